# SPDX-License-Identifier: Apache-2.0
"""Puts a checked plan on a model, and takes it off again without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from activation_swap.core.attention_calls import AttentionCalls
from activation_swap.core.chunks import Chunks
from activation_swap.core.engine import Engine
from activation_swap.core.hooked_site import HookedSite
from activation_swap.core.hooks import AfterAttention, BeforeAttention, InertHook
from activation_swap.core.layer_chain import LayerChain, window_of
from activation_swap.core.link import Links
from activation_swap.core.torch_private import drop_forward_hooks, forward_pre_hooks
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from activation_swap._overlap import Overlap
    from activation_swap._stats import SwapStats
    from activation_swap._swap import Swap
    from activation_swap.core.schedule.torch_pipelining import Attachment
    from activation_swap.core.swap_plan import SwapPlan

__all__ = ["InstalledSwap", "find_installation", "install"]


class InstalledSwap:
    """The hooks of one swap on the attentions of one model (or of its local stages).

    Attributes:
        sites: Where the hooks are, in forward order.
        recorded: Indices of the sites whose saved tensors are taken.
        setup: What the trainer told.
        policy: What moves.
    """

    def __init__(self, plan: SwapPlan, *, links: Links | None = None) -> None:
        self.sites = tuple(map(HookedSite, plan.sites))
        self.recorded = plan.recorded()
        self.setup = plan.setup
        self.policy = plan.policy
        self._swap: ref[Swap] | None = None
        self._links = Links(plan.policy) if links is None else links
        # Under a pipeline, a chunk goes layer by layer with one group in flight.
        pipelined = plan.setup.pp_size > 1
        window = 1 if pipelined else window_of(plan.policy.fraction)
        self._engine = Engine(self._links, ahead=window)
        self._handles: list[Any] = []
        self._removed = False
        self._attachment: Attachment | None = None
        self._chunks: Chunks | None = None
        order: LayerChain | Chunks
        if pipelined:
            order = self._chunks = Chunks(self._engine, self.sites)
        else:
            order = LayerChain(
                self._engine,
                first=min(self.recorded, default=0),
                last=len(self.sites) - 1,
                keep_last=plan.policy.keep_last,
                window=window,
            )
        self._calls = AttentionCalls(
            self.sites,
            recorded=self.recorded,
            policy=self.policy,
            engine=self._engine,
            links=self._links,
            order=order,
        )

    @property
    def active(self) -> bool:
        """Whether the hooks are on the model."""
        return bool(self._handles)

    @property
    def swap(self) -> Swap | None:
        """The public handle, while somebody holds it."""
        return None if self._swap is None else self._swap()

    @swap.setter
    def swap(self, swap: Swap) -> None:
        self._swap = ref(swap)

    def place(self, index: int, module: nn.Module) -> None:
        """Register the hooks of site number ``index`` on its module."""
        drop_forward_hooks(module, InertHook)
        before = BeforeAttention(self._calls, index, self)
        after = AfterAttention(self._calls, index, self)
        self._handles += (
            module.register_forward_pre_hook(before, with_kwargs=True),
            # Called always: an exception in the attention must not leave its hooks active.
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        )

    def describe(self) -> str:
        """Return the number of attentions and, under a pipeline, whether a schedule is followed."""
        attentions = f"attentions={len(self.sites)}"
        if self._chunks is None:
            return attentions
        return f"{attentions}, attached={self._attachment is not None}"

    def stats(self) -> SwapStats:
        """Return the counters since the last reset."""
        return self._engine.stats()

    def reset_stats(self) -> None:
        """Start the counters anew."""
        self._engine.reset_stats()

    @property
    def overlaps(self) -> list[Overlap]:
        """What takes the waits of compute in, while somebody measures."""
        return self._links.overlaps

    @property
    def groups(self) -> Chunks:
        """The verbs of a pipeline scheduler.

        Raises:
            RejectedError: pp_size is 1.
        """
        if self._chunks is None:
            raise Reason.WITHOUT_PIPELINE.error(found=f"{self.setup}")
        return self._chunks

    def attach(self, schedule: Any) -> None:
        """Let a ``torch.distributed.pipelining`` schedule drive the chunks, in place of the last.

        Raises:
            RejectedError: It is no schedule of this swap's stages, or pp_size is 1.
            SwapStateError: One of its stages follows another swap.
        """
        chunks = self.groups
        # Imported here: torch.distributed.pipelining is heavy, and only pipelines need it.
        from activation_swap.core.schedule.torch_pipelining import attach  # noqa: PLC0415

        self._attachment = attach(
            schedule,
            chunks,
            sites=self.sites,
            recorded=self.recorded,
            replaces=self._attachment,
        )
        chunks.drive()

    def remove(self) -> None:
        """Take the hooks off and give the pinned memory up. Repeatable; live graphs stay right."""
        # Each step may be made twice: by the next call after an interrupt anywhere in this one, by
        # a signal handler inside of it, or by another thread.
        attachment = self._attachment
        if attachment is not None:
            attachment.detach()
            self._attachment = None
        for handle in tuple(self._handles):
            handle.remove()
        self._handles.clear()
        if not self._removed:
            self._calls.close()
            self._engine.close()
            self._removed = True


def install(plan: SwapPlan, *, links: Links | None = None) -> InstalledSwap:
    """Install a plan.

    Args:
        plan: Checked by the registry: nothing here can refuse it.
        links: Where tests and benchmarks put transfers of their own.

    Returns:
        The live installation.
    """
    installation = InstalledSwap(plan, links=links)
    for index, site in enumerate(plan.sites):
        installation.place(index, site.module)
    return installation


def find_installation(modules: Iterable[nn.Module]) -> InstalledSwap | None:
    """Return the live installation whose hooks are on any of ``modules``, or ``None``."""
    for module in modules:
        for hook in forward_pre_hooks(module):
            if isinstance(hook, BeforeAttention) and isinstance(hook.installation, InstalledSwap):
                return hook.installation
    return None
