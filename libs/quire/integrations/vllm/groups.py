"""Groups of layers that share a table of blocks: vLLM has one for each kind of attention that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NULL_BLOCK = 0
"""Id of vLLM's block that stands for blocks outside a window."""


class Kind(Enum):
    """Kinds of layers by the earlier tokens that they read.

    FULL reads all of them, WINDOW the last `reach`, CHUNKED the tokens of the same chunk of `reach` tokens. STATE has
    no attention: its layers keep a recurrent state, which vLLM stores at the ends of blocks.
    """

    FULL = "full"
    WINDOW = "sliding window"
    CHUNKED = "chunked"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Group:
    """Describes one group of layers.

    Args:
        number: Index of the group in vLLM's `kv_cache_groups`.
        layers: Names of the layers.
        kind: Tokens that the layers read.
        block_tokens: Tokens in a block.
        block_bytes: Bytes of a block in all layers of one worker.
        reach: Tokens of a window or chunk; 0 for other kinds.
    """

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

    def blocks_to_load(self, computed: int, end: int) -> int:
        """Return the number of blocks to load for a prefix of `end` tokens, of which vLLM has `computed`."""
        if end <= computed:
            return 0
        first = max(computed // self.block_tokens, self.first_read(end))
        return max(0, end // self.block_tokens - first)


def bytes_to_load(groups: Sequence[Group], computed: int, end: int) -> int:
    """Return the number of bytes to load for a prefix of `end` tokens, of which vLLM has `computed`."""
    return sum(group.blocks_to_load(computed, end) * group.block_bytes for group in groups)
