"""The owner of each slot of the arena: it is free, or one transfer's, one promotion's, or one copy's of a chunk.

Slots of a store may have followers: deliveries that read them before the store is acknowledged. A slot that its owner
frees is free once they have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

from quire_storage.core.pool.slots import Shape, SlotAllocator

QUARANTINED: Final = -1
"""Owner of slots that a peer may still touch: nothing gets them again before the next start."""

FOLLOWED: Final = -2
"""Owner of slots that their owner has freed, and that followers read."""


class Ledger:
    """Slots by the number of their owner. Moving a slot names both owners, so that none is freed under a third."""

    def __init__(self, slots: SlotAllocator) -> None:
        self.slots = slots
        self._owners: dict[int, dict[int, int]] = {}
        self._followed: dict[int, list[int]] = {}
        self._followers: Counter[int] = Counter()

    def take(self, shape: Shape, count: int, owner: int) -> list[int]:
        """Up to `count` slots."""
        offsets: list[int] = self.slots.take(shape, count).tolist()
        assert self._followers.keys().isdisjoint(offsets), "a slot that followers read is nobody else's"
        for slab, part in groupby(offsets, self.slots.slab_of):
            self._owners.setdefault(slab, {}).update(dict.fromkeys(part, owner))
        return offsets

    def owner(self, offset: int) -> int | None:
        """Return the owner of a slot; None for a free one."""
        return self._owners.get(self.slots.slab_of(offset), {}).get(offset)

    def move(self, offset: int, old_owner: int, new_owner: int) -> None:
        """Slot `offset` passes from one owner to another."""
        slab = self._owners[self.slots.slab_of(offset)]
        assert slab[offset] == old_owner, "a slot is given by its owner"
        slab[offset] = new_owner

    def free(self, offsets: Iterable[int], owner: int) -> None:
        """Free slots; those that followers read later, when the last of them has ended."""
        freed = list[int]()
        for offset in offsets:
            slab = self._owners[self.slots.slab_of(offset)]
            assert slab[offset] == owner, "a slot is freed by its owner"
            if offset in self._followers:
                slab[offset] = FOLLOWED
                continue
            freed.append(offset)
            del slab[offset]
            if not slab:
                del self._owners[self.slots.slab_of(offset)]
        self.slots.free(freed)

    @property
    def followed(self) -> Mapping[int, Sequence[int]]:
        """Slots that followers read, by holder."""
        return self._followed

    def follow(self, offsets: Sequence[int], holder: int) -> None:
        """Preserve the bytes of slots, whatever becomes of their owners, until `unfollow`."""
        self._followed.setdefault(holder, []).extend(offsets)
        self._followers.update(offsets)

    def unfollow(self, holder: int) -> None:
        """A follower has ended; nothing for one that follows none."""
        for offset in self._followed.pop(holder, ()):
            self._followers[offset] -= 1
            if not self._followers[offset]:
                del self._followers[offset]
                if self.owner(offset) == FOLLOWED:
                    self.free([offset], FOLLOWED)

    def owners_in(self, slab: int) -> set[int]:
        """Owners of the slots of a slab."""
        return set(self._owners.get(slab, {}).values())

    def check(self, owners: dict[int, int]) -> None:
        """`owners`: whose each slot is, by what the owners say. Raises `AssertionError` where the ledger differs."""
        owned = {offset: owner for slab in self._owners.values() for offset, owner in slab.items()}
        claimed = {offset: owner for offset, owner in owned.items() if owner not in (QUARANTINED, FOLLOWED)}
        assert claimed == owners, f"slots by the ledger {claimed}, by their owners {owners}"
        assert self.slots.taken() == set(owned), "a slot is taken if, and only if, it has an owner"
        followers = Counter(offset for offsets in self._followed.values() for offset in offsets)
        assert self._followers == followers, "followers are counted"
        assert followers.keys() >= {offset for offset, owner in owned.items() if owner == FOLLOWED}, "somebody reads it"
        assert followers.keys() <= set(owned), "what followers read is not free"
