"""The owner of each slot of the arena: it is free, or one transfer's, one promotion's, or one copy's of a chunk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quire_storage.core.pool.slots import Shape, SlotAllocator

QUARANTINED: Final = -1
"""Owner of slots that a peer may still touch: nothing gets them again before the next start."""


class Ledger:
    """Slots by the number of their owner. Moving a slot names both owners, so that none is freed under a third."""

    def __init__(self, slots: SlotAllocator) -> None:
        self.slots = slots
        self._owners: dict[int, dict[int, int]] = {}

    def take(self, shape: Shape, count: int, owner: int) -> list[int]:
        """Up to `count` slots."""
        offsets: list[int] = self.slots.take(shape, count).tolist()
        for offset in offsets:
            self._owners.setdefault(self.slots.slab_of(offset), {})[offset] = owner
        return offsets

    def move(self, offset: int, old_owner: int, new_owner: int) -> None:
        """Slot `offset` passes from one owner to another."""
        slab = self._owners[self.slots.slab_of(offset)]
        assert slab[offset] == old_owner, "a slot is given by its owner"
        slab[offset] = new_owner

    def free(self, offsets: Iterable[int], owner: int) -> None:
        freed = list(offsets)
        for offset in freed:
            slab = self._owners[self.slots.slab_of(offset)]
            assert slab.pop(offset) == owner, "a slot is freed by its owner"
            if not slab:
                del self._owners[self.slots.slab_of(offset)]
        self.slots.free(freed)

    def owners_in(self, slab: int) -> set[int]:
        """Owners of the slots of a slab."""
        return set(self._owners.get(slab, {}).values())

    def check(self, owners: dict[int, int]) -> None:
        """`owners`: whose each slot is, by what the owners say. Raises `AssertionError` where the ledger differs."""
        owned = {offset: owner for slab in self._owners.values() for offset, owner in slab.items()}
        claimed = {offset: owner for offset, owner in owned.items() if owner != QUARANTINED}
        assert claimed == owners, f"slots by the ledger {claimed}, by their owners {owners}"
        assert self.slots.taken() == set(owned), "a slot is taken if, and only if, it has an owner"
