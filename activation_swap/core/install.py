"""Puts a checked plan on a model, and takes it off again without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from activation_swap.core.engine import Engine
from activation_swap.core.hooks import AfterAttention, BeforeAttention, InertHook, Tracer
from activation_swap.core.layer_chain import LayerChain
from activation_swap.core.link import Links
from activation_swap.core.microbatch_groups import MicrobatchGroups
from activation_swap.core.torch_private import drop_forward_hooks, forward_pre_hooks
from activation_swap.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from activation_swap._stats import SwapStats
    from activation_swap._swap import Swap
    from activation_swap.core.schedule.torch_pipelining import Attachment
    from activation_swap.core.site import SwapPlan

__all__ = ["InstalledSwap", "find_installation", "install"]


class InstalledSwap:
    """The hooks of one swap on the attentions of one model (or of its local stages)."""

    def __init__(self, plan: SwapPlan, *, links: Links | None = None) -> None:
        self.plan = plan
        self._swap: ref[Swap] | None = None
        self._links = Links(plan.policy) if links is None else links
        self._engine = Engine(self._links)
        self._handles: list[Any] = []
        self._attachment: Attachment | None = None
        self.groups: MicrobatchGroups | None
        order: LayerChain | MicrobatchGroups
        if plan.setup.pp_size > 1:
            order = self.groups = MicrobatchGroups(self._engine, plan.sites)
        else:
            self.groups = None
            order = LayerChain(
                self._engine, last=len(plan.sites) - 1, keep_last=plan.policy.keep_last
            )
        self._tracer = Tracer(plan, engine=self._engine, links=self._links, order=order)

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

    def place(self) -> None:
        """Register the hooks on every site."""
        for index, site in enumerate(self.plan.sites):
            drop_forward_hooks(site.module, InertHook)
            before = BeforeAttention(self._tracer, index, self)
            after = AfterAttention(self._tracer, index, self)
            self._handles += (
                site.module.register_forward_pre_hook(before, with_kwargs=True),
                # Called always: an exception in the attention must not leave its hooks active.
                site.module.register_forward_hook(after, with_kwargs=True, always_call=True),
            )

    def stats(self) -> SwapStats:
        """Return the counters since the last reset."""
        return self._engine.stats()

    def reset_stats(self) -> None:
        """Start the counters anew."""
        self._engine.reset_stats()

    def attach(self, schedule: Any) -> None:
        """Let a ``torch.distributed.pipelining`` schedule drive the groups.

        Raises:
            RejectedError: It is no schedule of this swap's stages, or pp_size is 1.
            SwapStateError: One of its stages, or this swap, follows another attachment.
        """
        if self.groups is None:
            raise Reason.ATTACH_WITHOUT_PIPELINE.error(found=f"{self.plan.setup}")
        # Imported here: torch.distributed.pipelining is heavy, and only pipelines need it.
        from activation_swap.core.schedule.torch_pipelining import attach  # noqa: PLC0415

        self._attachment = attach(schedule, self.groups, sites=self.plan.sites)
        self.groups.drive()

    def remove(self) -> None:
        """Take the hooks off and give the pinned memory up. Repeatable; live graphs stay right."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.detach()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        if handles:
            self._tracer.close_interrupted()
            self._engine.close()


def install(plan: SwapPlan) -> InstalledSwap:
    """Install a plan.

    Args:
        plan: Checked by the registry: nothing here can refuse it.

    Returns:
        The live installation.
    """
    installation = InstalledSwap(plan)
    installation.place()
    return installation


def find_installation(modules: Iterable[nn.Module]) -> InstalledSwap | None:
    """Return the live installation whose hooks are on any of ``modules``, or ``None``."""
    for module in modules:
        for hook in forward_pre_hooks(module):
            if isinstance(hook, BeforeAttention) and isinstance(hook.installation, InstalledSwap):
                return hook.installation
    return None
