"""The part of a prompt that another engine stores, and the plan of a load that receives it during the store."""

from __future__ import annotations

from quire.integrations.vllm.groups import Group
from quire.integrations.vllm.plan import FollowPlan
from quire.integrations.vllm.scheduler.requests import BlockNames, State


def part_of_handover(blocks: BlockNames, state: State, computed: int, usable: int, unit: int) -> tuple[int, bool]:
    """Return the end of what another engine stores of a prompt, and whether some of it cannot be read yet.

    Args:
        blocks: Names of the engine's blocks.
        state: Of the request.
        computed: Tokens that this engine has.
        usable: Tokens that may be loaded.
        unit: Tokens after which blocks of all groups end.
    """
    handover = state.handover
    assert handover is not None, "awaited"
    parts = list(zip(state.parts, blocks.groups, strict=True))
    named = min(blocks.count(state, group) * group.block_tokens for _, group in parts)
    end = min(usable, named, usable if handover.tokens is None else handover.tokens) // unit * unit
    is_short = any(part.looked_up * group.block_tokens < end for part, group in parts) and computed < end
    return end, is_short


def follow_plan(blocks: BlockNames, state: State, group: Group, stop: int, now_s: float) -> FollowPlan:
    """Return how a load receives the first `stop` blocks of a group while they are stored."""
    assert state.handover is not None, "its stores are followed"
    return FollowPlan(
        namespaces=blocks.spaces(state, group),
        keys=blocks.keys(state, group, stop),
        wait_s=max(0.0, state.handover.until_s - now_s),
    )
