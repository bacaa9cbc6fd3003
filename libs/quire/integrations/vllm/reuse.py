"""Which blocks an engine has seen before: a store that nobody reads costs the engine time, and Quire room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

_KEPT: Final = 262_144


class Reuse:
    """The hashes of blocks that requests had lately, 32 bytes each and about 30 MB in all."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def seen(self, hashes: Sequence[bytes]) -> int:
        """Return how many from the first on earlier requests had."""
        for count, block_hash in enumerate(hashes):
            if bytes(block_hash) not in self._hashes:
                return count
        return len(hashes)

    def note(self, hashes: Sequence[bytes]) -> None:
        """Remember the blocks of a request, the first ones for longest."""
        for block_hash in reversed(hashes):
            key = bytes(block_hash)
            self._hashes[key] = None
            self._hashes.move_to_end(key)
        while len(self._hashes) > self._kept:
            self._hashes.popitem(last=False)
