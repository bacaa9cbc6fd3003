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
    """Chooses from one slab until nothing of it can be evicted, or the index refused some of it.

    Chunks that have the shape, and are the coldest, need no slab of their own.
    """

    def __init__(self, order: LeafArc, pool: PoolMap | None) -> None:
        self._order = order
        self._pool = pool
        self._beside: list[bytes] = []
        self._shape: Shape | None = None

    def victims(self, shape: Shape, count: int, is_kept: Kept, limit: int) -> list[bytes]:
        """At most `limit` keys, children first, taken out of the order: the `count` coldest while they have the shape.

        Where the coldest one has another shape, keys of its slab. Empty if no such slab has a key that can be evicted.
        """
        if shape != self._shape:  # what was chosen beside another one may have been stored again since
            self._shape, self._beside = shape, []
        skipped: list[bytes] = []
        victims: list[bytes] = []
        while not victims and len(skipped) < _SLABS_TRIED and self._pool is not None:
            if not self._beside:
                key = self._order.victim(is_kept)
                placed = self._pool.get(key) if key is not None else None
                if key is None or placed is None:
                    break
                if placed.header.chunk.shape == shape:
                    victims = self._coldest(shape, is_kept, min(count, limit))
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

    def _coldest(self, shape: Shape, is_kept: Kept, limit: int) -> list[bytes]:
        assert self._pool is not None, "the order is of its chunks"
        coldest: list[bytes] = []
        while len(coldest) < limit and (key := self._order.victim(is_kept)) is not None:
            if self._pool.shape_of(key) != shape:
                break
            self._order.evicted(key)
            coldest.append(key)
        return coldest

    def _leaves(self, keys: Sequence[bytes], is_kept: Kept, limit: int) -> list[bytes]:
        leaves: list[bytes] = []
        previous = -1
        while len(leaves) > previous and len(leaves) < limit:
            previous = len(leaves)
            for key in keys:
                if len(leaves) == limit:
                    break
                if key in self._order and self._order.is_leaf(key) and not is_kept(key):
                    self._order.evicted(key)
                    leaves.append(key)
        return leaves
