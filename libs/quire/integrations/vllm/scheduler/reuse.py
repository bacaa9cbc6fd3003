"""Blocks that an engine has seen: stores without readers cost the engine time and the cluster memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

_HASHES_MAX: Final = 262_144


class BlockReuse:
    """Remembers the hashes of recent requests' blocks, in about 30 MB."""

    def __init__(self, hashes_max: int = _HASHES_MAX) -> None:
        self._hashes_max = hashes_max
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def seen(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading hashes that earlier requests had."""
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
        while len(self._hashes) > self._hashes_max:
            self._hashes.popitem(last=False)
