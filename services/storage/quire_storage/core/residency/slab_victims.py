"""Choice of the chunks to evict when slots of one shape are needed: neighbours, so that a slab comes free.

Bytes here and there, in slabs of other shapes, would not help. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire_storage.core.eviction import Kept, LeafArc
from quire_storage.core.pool.map import PoolMap
from quire_storage.core.pool.slots import Shape

_SLABS_TRIED: Final = 64


class SlabVictims:
    """Chooses from one slab until nothing of it can be evicted, or the index refused some of it."""

    def __init__(self, order: LeafArc, pool: PoolMap | None) -> None:
        self._order = order
        self._pool = pool
        self._beside: list[bytes] = []

    def victims(self, shape: Shape, is_kept: Kept, limit: int) -> list[bytes]:
        """Keys, children first, taken out of the order: the coldest one if it has the shape, else some of its slab.

        Empty if no such slab has a key that can be evicted.
        """
        skipped: list[bytes] = []
        victims: list[bytes] = []
        while not victims and len(skipped) < _SLABS_TRIED and self._pool is not None:
            if not self._beside:
                key = self._order.victim(is_kept)
                placed = self._pool.get(key) if key is not None else None
                if key is None or placed is None:
                    break
                if placed.header.chunk.shape == shape:
                    self._order.evicted(key)
                    victims = [key]
                    break
                self._beside = self._pool.keys_beside(placed)
                self._order.set_aside(key)
                skipped.append(key)
            victims = self._leaves(self._beside, is_kept, limit)
            if not victims:
                self._beside = []
        for key in reversed(skipped):
            self._order.release(key)
        return victims

    def refused(self) -> None:
        """The index keeps some of the chosen ones: try another slab."""
        self._beside = []

    def _leaves(self, keys: Sequence[bytes], is_kept: Kept, limit: int) -> list[bytes]:
        leaves: list[bytes] = []
        previous = -1
        while len(leaves) > previous and len(leaves) < limit:
            previous = len(leaves)
            for key in keys:
                if key in self._order and self._order.is_leaf(key) and not is_kept(key):
                    self._order.evicted(key)
                    leaves.append(key)
        return leaves
