# SPDX-License-Identifier: Apache-2.0
"""Random legal compute orders of one rank."""

from __future__ import annotations

from hypothesis import strategies as st

from activation_swap.core.schedule.actions import Action, ComputeOrder, Kind, Step

FULL = (Kind.FORWARD, Kind.FULL_BACKWARD)
SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@st.composite
def legal_orders(draw: st.DrawFn) -> ComputeOrder:
    """Interleave the actions of some chunks at random, and overlap some neighbours."""
    stages = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
    microbatches = draw(st.integers(1, 8))
    chunks = [(stage, m) for stage in stages for m in range(microbatches)]
    todo = {chunk: list(draw(st.sampled_from([FULL, SPLIT]))) for chunk in chunks}
    actions = []
    while todo:
        chunk = draw(st.sampled_from(sorted(todo)))
        actions.append(Action(chunk[0], todo[chunk].pop(0), chunk[1]))
        if not todo[chunk]:
            del todo[chunk]
    order: list[Step] = []
    for action in actions:
        previous = order[-1].members if order else ()
        may_join = len(previous) == 1 and previous[0].key != action.key
        if may_join and draw(st.integers(0, 4)) == 0:
            order[-1] = Step((*previous, action))
        else:
            order.append(Step((action,)))
    return tuple(order)


def attention_counts() -> st.SearchStrategy[dict[int, int]]:
    """Number of attentions of each stage that :func:`legal_orders` can draw."""
    return st.fixed_dictionaries({stage: st.integers(0, 6) for stage in range(6)})
