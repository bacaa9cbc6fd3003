"""Groups of layers that share a table of blocks: vLLM has one for each kind of attention that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NULL_BLOCK = 0
"""vLLM's block for what a layer no longer needs."""


class Kind(Enum):
    """Which earlier tokens a layer reads: all, the last `reach`, those of the same `reach` tokens, or none.

    Layers without attention have a state, which vLLM keeps where a block ends.
    """

    FULL = "full"
    WINDOW = "sliding window"
    CHUNKED = "chunked"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Group:
    """One group. `block_bytes`: of a block in all layers of one worker."""

    number: int
    layers: tuple[str, ...]
    kind: Kind
    block_tokens: int
    block_bytes: int
    reach: int = 0

    def first_read(self, tokens: int) -> int:
        """Return the first block that is read when the token behind `tokens` is computed."""
        if self.kind is Kind.WINDOW:
            return max(0, tokens - self.reach + 1) // self.block_tokens
        if self.kind is Kind.CHUNKED:
            return tokens // self.reach * self.reach // self.block_tokens
        if self.kind is Kind.STATE:
            return (tokens - 1) // self.block_tokens
        return 0

    def blocks_to_load(self, computed: int, until: int) -> int:
        """Return how many blocks must arrive for a prefix of `until` tokens, of which `computed` are there."""
        if until <= computed:
            return 0
        first = max(computed // self.block_tokens, self.first_read(until))
        return max(0, until // self.block_tokens - first)


def bytes_to_load(groups: Sequence[Group], computed: int, until: int) -> int:
    """Return the bytes that must arrive for a prefix of `until` tokens, of which `computed` are there."""
    return sum(group.blocks_to_load(computed, until) * group.block_bytes for group in groups)
