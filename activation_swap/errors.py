# SPDX-License-Identifier: Apache-2.0
"""Every way this package refuses: one enum member per reason, and the exception classes.

A rejection is a value with a reason and data. ``Reason.X.error(...)`` is the only constructor of
exceptions in the package, so that the catalogue, the tests and the documentation cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ActivationSwapError",
    "InPlaceChangeError",
    "Reason",
    "RejectedError",
    "SwapStateError",
    "UnsupportedBackendError",
]

_NOTHING_INSTALLED = "nothing was installed"
_NOTHING_RUN = "nothing was run"


class ActivationSwapError(Exception):
    """Base of every exception that this package raises.

    Attributes:
        reason: The catalogue entry.
        code: Its permanent code, such as ``"AS104"``.
        where: FQN, file or key that the refusal is about, or ``None``.
        found: What was found there.
        expected: What would have been accepted.
        fix: What to do about it.
        trace: Further findings, one line each.
    """

    def __init__(
        self,
        reason: Reason,
        *,
        found: str,
        where: str | None,
        expected: str,
        fix: str,
        trace: tuple[str, ...],
    ) -> None:
        self.reason = reason
        self.found = found
        self.where = where
        self.expected = expected
        self.fix = fix
        self.trace = trace
        super().__init__(self._render())

    @property
    def code(self) -> str:
        """The permanent code, such as ``"AS104"``."""
        return self.reason.value.code

    def _render(self) -> str:
        spec = self.reason.value
        lines = [f"{spec.code}: {spec.summary}; {spec.consequence}."]
        if self.where is not None:
            lines.append(f"  where:    {self.where}")
        lines.append(f"  found:    {self.found}")
        lines.append(f"  expected: {self.expected}")
        lines.extend(f"  also:     {line}" for line in self.trace)
        lines.append(f"  fix:      {self.fix}")
        return "\n".join(lines)

    def also(self, others: Sequence[ActivationSwapError]) -> ActivationSwapError:
        """Return this error with the findings of ``others`` added, one line each."""
        lines = (
            f"{other.code} {other.where or other.reason.value.summary}: "
            f"found {other.found}, expected {other.expected}"
            for other in others
        )
        return _rebuild(self.reason, self._data() | {"trace": (*self.trace, *lines)})

    def within(self, prefix: str) -> ActivationSwapError:
        """Return this error with ``prefix`` before the place that it is about."""
        where = prefix.removesuffix(".") if self.where is None else prefix + self.where
        return _rebuild(self.reason, self._data() | {"where": where})

    def _data(self) -> dict[str, Any]:
        return {
            "found": self.found,
            "where": self.where,
            "expected": self.expected,
            "fix": self.fix,
            "trace": self.trace,
        }

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by reason and data, so that errors cross process boundaries whole."""
        return _rebuild, (self.reason, self._data())


class RejectedError(ActivationSwapError, ValueError):
    """The model, the set-up or a value is not one that this release supports."""


class UnsupportedBackendError(ActivationSwapError, NotImplementedError):
    """Another back end than PyTorch was asked for."""


class SwapStateError(ActivationSwapError, RuntimeError):
    """A step was asked for that the state of the swap does not allow."""


class InPlaceChangeError(ActivationSwapError, RuntimeError):
    """A saved tensor was changed in place before its copy was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonSpec:
    """What the catalogue knows of one reason.

    Attributes:
        code: Permanent code. AS1xx registry, AS2xx compat, AS3xx install, AS4xx configuration,
            AS5xx schedule, AS6xx run time.
        kind: Exception class to raise.
        summary: One sentence without a full stop.
        expected: What would have been accepted.
        fix: What to do.
        consequence: What did not happen.
    """

    code: str
    kind: type[ActivationSwapError]
    summary: str
    expected: str
    fix: str
    consequence: str = _NOTHING_INSTALLED


@unique
class Reason(Enum):
    """The closed catalogue of refusals."""

    _value_: ReasonSpec

    # AS1xx: the registry: what is asked for, and of which model.
    UNKNOWN_MODE = ReasonSpec(
        code="AS101",
        kind=RejectedError,
        summary="unknown activation_swap mode",
        expected="activation_swap: none | attention",
        fix="set activation_swap to one of the expected values",
    )
    NOT_A_TORCH_MODULE = ReasonSpec(
        code="AS102",
        kind=UnsupportedBackendError,
        summary="the model is not a torch.nn.Module",
        expected="a torch.nn.Module, or a sequence of them under pipeline parallelism",
        fix="pass the PyTorch model; other frameworks are not implemented",
    )
    OTHER_BACKEND = ReasonSpec(
        code="AS103",
        kind=UnsupportedBackendError,
        summary="the training back end is not implemented",
        expected="backend='pytorch'",
        fix="train with PyTorch, or set activation_swap: none",
    )
    NO_ADAPTER = ReasonSpec(
        code="AS104",
        kind=RejectedError,
        summary="no adapter is registered for this model class",
        expected="transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM",
        fix="pass a supported model, or register an adapter for this class",
    )
    SUBCLASSED_MODEL = ReasonSpec(
        code="AS105",
        kind=RejectedError,
        summary="the model's class is a subclass of a supported one",
        expected="the exact class, or the class that fully_shard makes of it",
        fix="register an adapter for this class, or train the parent class",
    )
    WRAPPED_MODEL = ReasonSpec(
        code="AS106",
        kind=RejectedError,
        summary="the model is inside a wrapper",
        expected="the model itself",
        fix="pass the wrapped model",
    )
    UNSUPPORTED_WRAPPER = ReasonSpec(
        code="AS107",
        kind=RejectedError,
        summary="the model is inside a wrapper that activation swap does not support",
        expected="a plain model, DistributedDataParallel or fully_shard",
        fix="use one of the expected ways to train in parallel",
    )
    NO_STAGE = ReasonSpec(
        code="AS108",
        kind=RejectedError,
        summary="an empty sequence of stage modules was passed",
        expected="one module, or one or more stage modules",
        fix="pass the stage modules of this rank",
    )
    STAGES_WITHOUT_PIPELINE = ReasonSpec(
        code="AS109",
        kind=RejectedError,
        summary="several stage modules were passed without pipeline parallelism",
        expected="one model with pp_size=1, or stage modules with pp_size > 1",
        fix="pass setup=TrainingSetup(pp_size=...), or apply to each model on its own",
    )
    INVALID_ADAPTER = ReasonSpec(
        code="AS110",
        kind=RejectedError,
        summary="an object was registered that is not an adapter",
        expected="mode 'attention', qualified class names, and a callable inspect",
        fix="implement activation_swap.adapters.Adapter",
        consequence="it was not registered",
    )
    DUPLICATE_ADAPTER = ReasonSpec(
        code="AS111",
        kind=RejectedError,
        summary="a model class has two adapters",
        expected="one adapter for each model class",
        fix="register one of them only",
        consequence="the second was not registered",
    )
    BROKEN_ENTRY_POINT = ReasonSpec(
        code="AS112",
        kind=RejectedError,
        summary="an adapter's entry point cannot be loaded",
        expected="module:attribute of an adapter that can be imported",
        fix="repair or uninstall the package that declares it",
    )
    COMPILE_REQUESTED = ReasonSpec(
        code="AS113",
        kind=RejectedError,
        summary="the trainer will use torch.compile",
        expected="compile=False: saved-tensor hooks and graph compilation do not mix",
        fix="train without torch.compile, or set activation_swap: none",
    )
    CHECKPOINT_REQUESTED = ReasonSpec(
        code="AS114",
        kind=RejectedError,
        summary="the trainer will recompute activations",
        expected="activation_checkpoint='off' or 'mlp': attention that is recomputed need not be "
        "swapped",
        fix="recompute MLP or MoE blocks alone or nothing, or set activation_swap: none",
    )
    INVALID_SETUP = ReasonSpec(
        code="AS115",
        kind=RejectedError,
        summary="the training set-up has an illegal value",
        expected="an activation_swap.TrainingSetup with legal fields",
        fix="correct the value",
    )
    INVALID_POLICY = ReasonSpec(
        code="AS116",
        kind=RejectedError,
        summary="the swap policy has an illegal value",
        expected="an activation_swap.SwapPolicy with legal fields",
        fix="correct the value",
    )
    ADAPTER_CONTRACT = ReasonSpec(
        code="AS117",
        kind=RejectedError,
        summary="an adapter breaks a rule that the registry relies on",
        expected="what activation_swap.testing.check_adapter says of sites, checks and bits",
        fix="repair the adapter",
        consequence="it should not be released",
    )
    # AS2xx: compat: the model is not as its Transformers release makes it.
    VERSION_TOO_OLD = ReasonSpec(
        code="AS201",
        kind=RejectedError,
        summary="this transformers release is too old",
        expected="transformers >= 4.51, the first release with Qwen3-MoE",
        fix="install a supported transformers release",
    )
    VERSION_UNREADABLE = ReasonSpec(
        code="AS202",
        kind=RejectedError,
        summary="the version of transformers cannot be read",
        expected="a version as PEP 440 defines it",
        fix="install a released transformers",
    )
    MISSING_PART = ReasonSpec(
        code="AS203",
        kind=RejectedError,
        summary="the model lacks a part that this transformers release has",
        expected="a module",
        fix="pass the model as transformers builds it, or report a changed release",
    )
    FOREIGN_CLASS = ReasonSpec(
        code="AS204",
        kind=RejectedError,
        summary="a part of the model is not of the class that this transformers release uses",
        expected="the exact class",
        fix="build the model without replacing classes, or report a changed release",
    )
    LAYER_CONTAINER = ReasonSpec(
        code="AS205",
        kind=RejectedError,
        summary="the decoder layers are in a container of another kind",
        expected="torch.nn.ModuleList; with pp_size > 1 torch.nn.ModuleDict too",
        fix="keep the layers in the container that transformers builds",
    )
    LAYER_COUNT = ReasonSpec(
        code="AS206",
        kind=RejectedError,
        summary="the number of decoder layers is wrong",
        expected="config.num_hidden_layers layers",
        fix="pass the whole model, or TrainingSetup(pp_size=...) for a pipeline stage",
    )
    LAYER_INDEX = ReasonSpec(
        code="AS207",
        kind=RejectedError,
        summary="the layer_idx of the attention modules is out of order",
        expected="each layer once, in ascending order",
        fix="build the layers in order, each with a module of its own",
    )
    ATTENTION_SIGNATURE = ReasonSpec(
        code="AS208",
        kind=RejectedError,
        summary="the attention's forward takes other parameters than this release's",
        expected="the recorded signature",
        fix="remove what patched the class, or report a changed release",
    )
    ATTENTION_PARTS = ReasonSpec(
        code="AS209",
        kind=RejectedError,
        summary="the attention lacks a projection or a norm",
        expected="children with a weight",
        fix="build the model without replacing its parts, or report a changed release",
    )
    MISPLACED_ATTENTION = ReasonSpec(
        code="AS210",
        kind=RejectedError,
        summary="an attention module is where none is known",
        expected="one attention in each decoder layer, as its self_attn",
        fix="build the model without moving or adding attention, or report a changed release",
    )
    CHECKPOINT_SITE = ReasonSpec(
        code="AS211",
        kind=RejectedError,
        summary="gradient checkpointing wraps another call than in this release",
        expected="the recorded site",
        fix="report a changed release: checkpointing could not be detected",
    )
    CHECKPOINT_FLAG = ReasonSpec(
        code="AS212",
        kind=RejectedError,
        summary="the flag of gradient checkpointing is not where this release keeps it",
        expected="a boolean attribute gradient_checkpointing",
        fix="report a changed release: checkpointing could not be detected",
    )
    REPLACED_FORWARD = ReasonSpec(
        code="AS213",
        kind=RejectedError,
        summary="the attention's forward was replaced",
        expected="the forward that transformers defines",
        fix="apply activation swap first, or do without the replacement",
    )
    RETURN_ARITY = ReasonSpec(
        code="AS214",
        kind=RejectedError,
        summary="the attention returns something else than in this transformers release",
        expected="a tuple of the recorded length",
        fix="remove what replaced the attention's output, or report a changed release",
        consequence="the forward was stopped",
    )
    # AS3xx: install: what would make a swap wrong or useless on any model.
    ALREADY_SWAPPED = ReasonSpec(
        code="AS301",
        kind=RejectedError,
        summary="a module of the model is swapped by another installation",
        expected="modules that no live Swap owns, or the same model, set-up and policy again",
        fix="call remove() on the live Swap, which apply returns for its model without set-up or "
        "policy",
    )
    COMPILED_MODEL = ReasonSpec(
        code="AS302",
        kind=RejectedError,
        summary="the model, or a part of it that holds attention, is compiled",
        expected="an eager model: saved-tensor hooks and torch.compile do not mix",
        fix="train without torch.compile, or set activation_swap: none",
    )
    CHECKPOINTING_ON = ReasonSpec(
        code="AS303",
        kind=RejectedError,
        summary="gradient checkpointing is on for a layer whose attention would be swapped",
        expected="gradient checkpointing off: what is recomputed need not be swapped",
        fix="call model.gradient_checkpointing_disable(), or set activation_swap: none",
    )
    CHECKPOINT_WRAPPER = ReasonSpec(
        code="AS304",
        kind=RejectedError,
        summary="a checkpoint wrapper surrounds attention that would be swapped",
        expected="no wrapper around attention; one around the MoE block alone is fine",
        fix="wrap layer.mlp instead, or set activation_swap: none",
    )
    META_DEVICE = ReasonSpec(
        code="AS305",
        kind=RejectedError,
        summary="attention weights are on the meta device",
        expected="weights on the device that trains",
        fix="materialise the model (to_empty, then load or initialise), then apply",
    )
    AMBIENT_SAVED_TENSOR_HOOKS = ReasonSpec(
        code="AS306",
        kind=RejectedError,
        summary="other saved-tensor hooks are active, or hooks are disabled",
        expected="no save_on_cpu, saved_tensors_hooks or torch.func transform around apply",
        fix="leave that context first; two owners of saved tensors do not mix",
    )
    TRACED = ReasonSpec(
        code="AS307",
        kind=RejectedError,
        summary="apply was called while a trace or a graph is being captured",
        expected="eager execution",
        fix="apply before tracing; attention swap and captured graphs do not mix",
    )
    QUANTIZED_MODEL = ReasonSpec(
        code="AS308",
        kind=RejectedError,
        summary="the model is quantized",
        expected="floating-point weights; quantized ones are untested",
        fix="train the unquantized model, or set activation_swap: none",
    )
    REPEATED_MODULE = ReasonSpec(
        code="AS309",
        kind=RejectedError,
        summary="one attention module occurs in several places",
        expected="each attention module once",
        fix="pass each stage once, and give each layer an attention of its own",
    )
    NO_ATTENTION = ReasonSpec(
        code="AS310",
        kind=RejectedError,
        summary="the model has no attention to swap",
        expected="at least one decoder layer, or pp_size > 1",
        fix="pass a model with layers, or set activation_swap: none",
    )
    # AS4xx: the reference trainer and its configuration.
    INVALID_CONFIG = ReasonSpec(
        code="AS401",
        kind=RejectedError,
        summary="a key or value of the configuration is not legal",
        expected="a key that help(activation_swap.trainer.config) lists, with a legal value",
        fix="correct the key or value",
        consequence=_NOTHING_RUN,
    )
    UNREADABLE_CONFIG = ReasonSpec(
        code="AS402",
        kind=RejectedError,
        summary="the configuration cannot be read",
        expected="a YAML file that holds a mapping; overrides as key=value",
        fix="check the path and the YAML",
        consequence=_NOTHING_RUN,
    )
    DEVICE_UNAVAILABLE = ReasonSpec(
        code="AS403",
        kind=RejectedError,
        summary="this machine does not have the device that was asked for",
        expected="auto | cpu | the type of an accelerator that torch can use here",
        fix="set device: auto, or install a torch built for the accelerator",
        consequence=_NOTHING_RUN,
    )
    UNREADABLE_MODEL = ReasonSpec(
        code="AS404",
        kind=RejectedError,
        summary="the model cannot be built from its configuration",
        expected="a preset, a directory with a Hugging Face config.json, or such a JSON file",
        fix="correct model.source, model.overrides or model.attn_implementation",
        consequence=_NOTHING_RUN,
    )
    NO_TRAINING_DATA = ReasonSpec(
        code="AS405",
        kind=RejectedError,
        summary="there is no text to train on",
        expected="paths or glob patterns of files with content, relative to the working directory",
        fix="correct data.files; neither ~ nor variables are expanded",
        consequence=_NOTHING_RUN,
    )
    UNREADABLE_TOKENIZER = ReasonSpec(
        code="AS406",
        kind=RejectedError,
        summary="the tokenizer cannot be read",
        expected="a local directory with a Hugging Face tokenizer that needs no code of its own",
        fix="correct data.tokenizer, or leave it out to train on bytes",
        consequence=_NOTHING_RUN,
    )
    VOCABULARY_TOO_SMALL = ReasonSpec(
        code="AS407",
        kind=RejectedError,
        summary="the model has fewer token embeddings than the tokenizer has tokens",
        expected="a model whose vocab_size covers the tokenizer",
        fix="set model.overrides.vocab_size, or use another tokenizer",
        consequence=_NOTHING_RUN,
    )
    EARLIER_RUN_IN_THE_WAY = ReasonSpec(
        code="AS408",
        kind=RejectedError,
        summary="the output directory holds an earlier run",
        expected="an output directory without checkpoints and metrics",
        fix="set another output, or pass --resume to go on from the newest checkpoint",
        consequence=_NOTHING_RUN,
    )
    DAMAGED_CHECKPOINT = ReasonSpec(
        code="AS409",
        kind=RejectedError,
        summary="a checkpoint cannot be read",
        expected="the files as this version of the trainer wrote them",
        fix="move this checkpoint away, to resume from the one before it",
        consequence=_NOTHING_RUN,
    )
    OTHER_TRAJECTORY = ReasonSpec(
        code="AS410",
        kind=RejectedError,
        summary="the checkpoint belongs to a run with other numbers",
        expected="the model, data, optimizer, batch and seed that the checkpoint was made with",
        fix="restore the keys listed above, or set another output",
        consequence=_NOTHING_RUN,
    )
    TRAINER_EXTRA_MISSING = ReasonSpec(
        code="AS411",
        kind=RejectedError,
        summary="a package that this command needs is not installed",
        expected="the packages of the trainer extra",
        fix="pip install 'activation-swap[trainer]'",
        consequence=_NOTHING_RUN,
    )
    NO_RANKS = ReasonSpec(
        code="AS412",
        kind=RejectedError,
        summary="the processes of this run do not make up a pipeline",
        expected="torchrun with a multiple of pp_size processes",
        fix="start it with torchrun --nproc-per-node=N -m activation_swap.trainer, or pp_size: 1",
        consequence=_NOTHING_RUN,
    )
    RESUME_UNDER_PIPELINE = ReasonSpec(
        code="AS413",
        kind=RejectedError,
        summary="a pipelined run writes no checkpoints and cannot resume",
        expected="--resume with pp_size: 1",
        fix="leave --resume out, or set pp_size: 1",
        consequence=_NOTHING_RUN,
    )
    NO_EXPERTS_CHOICE = ReasonSpec(
        code="AS414",
        kind=RejectedError,
        summary="this transformers release has one implementation of experts, and no choice",
        expected="transformers >= 5.0, or experts_implementation left out",
        fix="leave model.experts_implementation out, or install a newer transformers",
        consequence=_NOTHING_RUN,
    )
    OUTPUT_UNWRITABLE = ReasonSpec(
        code="AS415",
        kind=RejectedError,
        summary="a run cannot write into the output directory",
        expected="a path where this process may make, lock and replace files",
        fix="set another output",
        consequence=_NOTHING_RUN,
    )
    TIED_EMBEDDING = ReasonSpec(
        code="AS416",
        kind=RejectedError,
        summary="the head shares its weight with the embedding, which is on another stage",
        expected="a model with tie_word_embeddings: false, or one stage that has both",
        fix="set model.overrides.tie_word_embeddings: false, or pp_size: 1",
        consequence=_NOTHING_RUN,
    )
    RUN_BROKE_OFF = ReasonSpec(
        code="AS417",
        kind=SwapStateError,
        summary="the command could not go on",
        expected="files that can be read and written, room on the disk, and enough memory",
        fix="remove the cause, and start the command again",
        consequence="what was complete before is kept",
    )
    OUTPUT_IN_USE = ReasonSpec(
        code="AS418",
        kind=RejectedError,
        summary="another run is writing into the output directory",
        expected="one run at a time in a directory",
        fix="set another output, or wait until that run has ended",
        consequence=_NOTHING_RUN,
    )
    UNREADABLE_METRICS = ReasonSpec(
        code="AS419",
        kind=RejectedError,
        summary="the metrics file has a line that no run of this trainer wrote",
        expected='lines of JSON with a "step" of 1 or more',
        fix="move the file away, or correct the line",
        consequence=_NOTHING_RUN,
    )
    # AS5xx: pipelines: schedules, plans and verbs.
    SCHEDULE_TEXT = ReasonSpec(
        code="AS501",
        kind=RejectedError,
        summary="text is not a schedule action",
        expected="[stage][kind][microbatch] such as 1F0, (0F4;3B1)OVERLAP_F_B or 1SET_GROUP0:TAIL, "
        "with each swap action next to the compute step that it belongs to",
        fix="correct the text",
        consequence="nothing was read",
    )
    SCHEDULE_ORDER = ReasonSpec(
        code="AS502",
        kind=RejectedError,
        summary="a compute order is not one of a training step",
        expected="per stage and microbatch one F, later either one B, or one I and later one W",
        fix="correct the compute order",
        consequence="nothing was planned",
    )
    SCHEDULE_PLAN = ReasonSpec(
        code="AS503",
        kind=RejectedError,
        summary="a swap plan breaks a rule of its schedule",
        expected="SET_GROUP before F; OFFLOAD after F, then WAIT_OFFLOAD; RELOAD, then WAIT_RELOAD "
        "before the first use",
        fix="correct the plan, or lower the compute order anew",
        consequence="nothing was run",
    )
    SCHEDULE_MISSES_SITES = ReasonSpec(
        code="AS504",
        kind=RejectedError,
        summary="the schedule does not run the swapped attentions",
        expected="a schedule over the stage modules that were passed to registry.apply",
        fix="apply the swap to the modules of this schedule's stages, then attach",
        consequence="nothing was attached",
    )
    SCHEDULE_ATTACHED = ReasonSpec(
        code="AS505",
        kind=SwapStateError,
        summary="a stage already follows another swap",
        expected="stages that no other swap is attached to",
        fix="remove the other swap, or build the schedule over stages of its own",
        consequence="nothing was attached",
    )
    NOT_A_SCHEDULE = ReasonSpec(
        code="AS506",
        kind=RejectedError,
        summary="the object is not a schedule of torch.distributed.pipelining",
        expected="a PipelineScheduleSingle or PipelineScheduleMulti over PipelineStage objects",
        fix="attach the schedule object, or drive Swap.groups from a scheduler of your own",
        consequence="nothing was attached",
    )
    SCHEDULE_DEADLOCK = ReasonSpec(
        code="AS507",
        kind=RejectedError,
        summary="the ranks of a schedule wait for each other for ever",
        expected="orders in which every action's input is computed before it",
        fix="correct the compute orders",
        consequence="nothing was simulated",
    )
    NO_SUCH_PIPELINE = ReasonSpec(
        code="AS508",
        kind=RejectedError,
        summary="no schedule has this shape",
        expected="a schedule of torch.distributed.pipelining, and a size that it allows",
        fix="change schedule, pp_size, stages_per_rank or microbatches",
        consequence="nothing was computed",
    )
    GROUP_STATE = ReasonSpec(
        code="AS509",
        kind=SwapStateError,
        summary="a verb came at a moment that its chunk's state does not allow",
        expected="set_group, launch_offload, wait_offload, launch_reload, wait_reload, in order",
        fix="correct the scheduler, or abort the chunk after a failed step",
        consequence="the step was not taken",
    )
    SCHEDULE_NOT_ATTACHED = ReasonSpec(
        code="AS510",
        kind=RejectedError,
        summary="pp_size is above 1, and nothing drives the swap",
        expected="Swap.attach(schedule), or the verbs of Swap.groups, before the first forward",
        fix="call swap.attach(schedule) after building the schedule",
        consequence="the forward was stopped",
    )
    WITHOUT_PIPELINE = ReasonSpec(
        code="AS511",
        kind=RejectedError,
        summary="a swap without pipeline parallelism follows no schedule and has no groups",
        expected="registry.apply(..., setup=TrainingSetup(pp_size=N)) with N above 1",
        fix="pass pp_size in TrainingSetup, or use neither Swap.attach nor Swap.groups",
        consequence="nothing was done",
    )
    NOT_A_CHUNK = ReasonSpec(
        code="AS512",
        kind=RejectedError,
        summary="a verb was given something else than the key of a chunk and what to keep of it",
        expected="(stage, microbatch), two whole numbers of at least 0; keep: a Keep",
        fix="correct the arguments of the verb of Swap.groups",
        consequence="nothing was done",
    )
    STEP_NOT_BEGUN = ReasonSpec(
        code="AS513",
        kind=SwapStateError,
        summary="a ScheduleRunner was given a compute call before any step was begun",
        expected="begin_step(plan) before each training step, begin_passive() before an evaluation",
        fix="call runner.begin_step(plan) first: without it nothing would move",
        consequence="the call was not made",
    )
    PIPELINE_ARGUMENT = ReasonSpec(
        code="AS514",
        kind=RejectedError,
        summary="a pipeline function was given an argument that it cannot take",
        expected="what the docstring says",
        fix="correct the argument",
        consequence="nothing was done",
    )
    # AS6xx: run time: what came after apply.
    CHECKPOINTING_ENABLED_LATER = ReasonSpec(
        code="AS601",
        kind=RejectedError,
        summary="gradient checkpointing was turned on for a swapped attention",
        expected="gradient checkpointing off for every layer with swapped attention",
        fix="turn gradient checkpointing off, or call remove() on the Swap",
        consequence="the forward was stopped",
    )
    COMPILED_LATER = ReasonSpec(
        code="AS602",
        kind=RejectedError,
        summary="a swapped model was compiled",
        expected="an eager model: saved-tensor hooks and graph compilation do not mix",
        fix="train without torch.compile, or call remove() on the Swap",
        consequence="the forward was stopped",
    )
    SAVED_TENSOR_CHANGED = ReasonSpec(
        code="AS603",
        kind=InPlaceChangeError,
        summary="a tensor saved for backward was changed in place",
        expected="the tensor unchanged until its device-to-host copy is complete",
        fix="do not modify the tensor in place, or clone it first",
        consequence="the backward was stopped",
    )
    ILLEGAL_TRANSITION = ReasonSpec(
        code="AS604",
        kind=SwapStateError,
        summary="a saved-tensor group was asked for an impossible step",
        expected="recording > offloading > offloaded > reloading > resident",
        fix="report this as a bug with the calls that led to it",
        consequence="the step was not taken",
    )
    OUTER_HOOKS = ReasonSpec(
        code="AS605",
        kind=RejectedError,
        summary="a swapped attention runs inside of other saved-tensor hooks",
        expected="no saved_tensors_hooks or save_on_cpu around the model: only the innermost act",
        fix="leave the other hooks' context, or call remove() on the Swap",
        consequence="the forward was stopped",
    )
    GRAPH_CAPTURE = ReasonSpec(
        code="AS606",
        kind=RejectedError,
        summary="a swapped attention is captured into a device graph",
        expected="eager training: a captured graph would replay copies into freed memory",
        fix="train without graph capture, or call remove() on the Swap",
        consequence="the forward was stopped",
    )
    NESTED_ATTENTION = ReasonSpec(
        code="AS607",
        kind=RejectedError,
        summary="a swapped attention was called inside of another one",
        expected="attention modules that do not call each other",
        fix="call remove() on the Swap",
        consequence="the forward was stopped",
    )
    HOOKS_DISABLED = ReasonSpec(
        code="AS608",
        kind=RejectedError,
        summary="a swapped attention runs where saved-tensor hooks are disabled",
        expected="no torch.func transform, nor disable_saved_tensors_hooks, around the forward",
        fix="call remove() on the Swap before the transform",
        consequence="the forward was stopped",
    )
    SHALLOW_COPY = ReasonSpec(
        code="AS609",
        kind=RejectedError,
        summary="a shallow copy of a swapped attention was called in its place",
        expected="the module itself; DataParallel calls copies that share its hooks",
        fix="use DistributedDataParallel, or copy.deepcopy",
        consequence="the forward was stopped",
    )

    def error(
        self,
        *,
        found: str,
        where: str | None = None,
        expected: str | None = None,
        fix: str | None = None,
        trace: tuple[str, ...] = (),
    ) -> ActivationSwapError:
        """Build the exception of this reason.

        Args:
            found: What was found, with its value or type.
            where: FQN, file or key.
            expected: Overrides the catalogue's text where the case knows better.
            fix: Overrides the catalogue's text where the case knows better.
            trace: Further findings, one line each.

        Returns:
            An instance of the reason's exception class, to be raised by the caller.
        """
        spec = self.value
        return spec.kind(
            self,
            found=found,
            where=where,
            expected=spec.expected if expected is None else expected,
            fix=spec.fix if fix is None else fix,
            trace=trace,
        )


def _rebuild(reason: Reason, data: dict[str, Any]) -> ActivationSwapError:
    return reason.error(**data)
