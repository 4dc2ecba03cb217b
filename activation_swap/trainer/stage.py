# SPDX-License-Identifier: Apache-2.0
"""A model cut into pipeline stages, layer by layer."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from activation_swap.errors import Reason

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

__all__ = ["Stage", "prune", "shard"]


def prune(model: PreTrainedModel, layers: range, *, first: bool, last: bool) -> PreTrainedModel:
    """Leave one stage's layers of a causal language model, and give the rest up.

    Args:
        model: The whole model. It is changed.
        layers: Numbers of the decoder layers that stay.
        first: Whether the stage has the embedding.
        last: Whether the stage has the final norm and the head.

    Returns:
        ``model``.

    Raises:
        RejectedError: AS416 when the head shares the embedding's weight and another stage has one
            of them: each would be trained on its own.
    """
    stack: Any = model.model
    head: Any = model.lm_head
    if head.weight is stack.embed_tokens.weight and not (first and last):
        raise Reason.TIED_EMBEDDING.error(
            found="lm_head.weight is model.embed_tokens.weight", where="lm_head"
        )
    stack.layers = nn.ModuleList(stack.layers[number] for number in layers)
    stack.config = copy(stack.config)
    stack.config.num_hidden_layers = len(layers)
    if not first:
        stack.embed_tokens = nn.Identity()
    if not last:
        stack.norm = nn.Identity()
        model.lm_head = nn.Identity()
    return model


class Stage(nn.Module):
    """What a pipeline schedule calls: tensor in, tensor out.

    Args:
        model: A pruned causal language model.
        first: Whether the input is token ids ``[batch, sequence]``; else hidden states.
        last: Whether the output is logits ``[batch, sequence, vocabulary]``; else hidden states.

    Attributes:
        model: The pruned model, which ``registry.apply`` takes.
        first: See above.
        last: See above.
    """

    def __init__(self, model: PreTrainedModel, *, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self.first = first
        self.last = last

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Run the stage's layers."""
        stack: Any = self.model.model
        name = "input_ids" if self.first else "inputs_embeds"
        hidden: torch.Tensor = stack(**{name: value}, use_cache=False).last_hidden_state
        if not self.last:
            return hidden
        head: Any = self.model.lm_head
        logits: torch.Tensor = head(hidden)
        return logits


def shard(stage: Stage, mesh: DeviceMesh) -> None:
    """Shard a stage with FSDP2, layer by layer.

    Args:
        stage: Changed in place.
        mesh: The ranks that compute the same stage on other data.
    """
    stack: Any = stage.model.model
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(stage, mesh=mesh)
