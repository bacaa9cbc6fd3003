"""Choice of the chunk to evict from a full tier. Pure; `quire bench cache` runs this very class over a trace.

`LeafArc` is ARC (Megiddo and Modha, FAST '03) on a forest. Chunks that were used once and chunks that were used more
often are two lists, each in order of use; how much of the tier belongs to which adapts to the keys that come back soon
after their eviction. So a scan passes through the first list, and a conversation that goes on moves to the second.

From the lowest tier only leaves are evicted, chunks that no chunk in the tier extends: so its content stays a set of
whole prefixes, and the cluster's index prefix-closed. An unused prefix unwinds from its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

Kept = Callable[[bytes], bool]


class Evictor(Protocol):
    """Order of eviction of one tier."""

    @property
    def used_bytes(self) -> int: ...
    def __contains__(self, key: bytes) -> bool: ...
    def __len__(self) -> int: ...
    def insert(self, key: bytes, parent: bytes, size: int) -> None:
        """Enter a chunk that is not in; `parent` may be unknown here."""

    def touch(self, key: bytes) -> None:
        """A chunk was used; one that is not in is ignored. Of a prefix touch the deepest first."""

    def remove(self, key: bytes) -> None:
        """Remove a chunk that left for another reason; an unknown one is ignored."""

    def evict(self, is_kept: Kept) -> bytes | None:
        """Take out the next one for which not `is_kept(key)`; None if there is none.

        One that is kept is set aside until it is touched or released, so that each is looked at once.
        """

    def release(self, key: bytes) -> None:
        """A chunk that may have been set aside is kept no more."""


@dataclass(slots=True)
class OrderEntry:
    """`often`: used more than once."""

    parent: bytes
    size: int
    often: bool


class Forest:
    """Entries, and who is a leaf. Children may come before their parents."""

    def __init__(self) -> None:
        self.entries: dict[bytes, OrderEntry] = {}
        self._children: dict[bytes, int] = {}
        self.used_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.entries)

    def is_leaf(self, key: bytes) -> bool:
        """Whether nothing here extends it."""
        return key not in self._children

    def enter(self, key: bytes, entry: OrderEntry) -> None:
        assert key not in self.entries, "a chunk enters a tier once"
        self.entries[key] = entry
        self.used_bytes += entry.size
        if entry.parent:
            self._children[entry.parent] = self._children.get(entry.parent, 0) + 1

    def leave(self, key: bytes) -> OrderEntry:
        entry = self.entries.pop(key)
        self.used_bytes -= entry.size
        if entry.parent:
            remaining = self._children[entry.parent] - 1
            if remaining:
                self._children[entry.parent] = remaining
            else:
                del self._children[entry.parent]
        return entry


class LeafArc(Forest):
    """Adapts within `capacity_bytes`, which is not a limit: the caller evicts as it needs room.

    `leaves_only`: False for a tier that has another below it.
    """

    def __init__(self, capacity_bytes: int, *, leaves_only: bool = True) -> None:
        super().__init__()
        self._leaves_only = leaves_only
        self._capacity_bytes = capacity_bytes
        self._lists: tuple[OrderedDict[bytes, None], ...] = (OrderedDict(), OrderedDict())
        self._bytes = [0, 0]
        self._aside: dict[bytes, None] = {}
        self._gone: tuple[OrderedDict[bytes, int], ...] = (OrderedDict(), OrderedDict())
        self._gone_bytes = [0, 0]
        self._target_bytes = 0.0  # of the first list

    def insert(self, key: bytes, parent: bytes, size: int) -> None:
        once, often = self._gone
        back_in = 0 if key in once else 1 if key in often else None
        if back_in is not None:
            step = size * max(1.0, len(self._gone[1 - back_in]) / len(self._gone[back_in]))
            target = self._target_bytes + (step if back_in == 0 else -step)
            self._target_bytes = min(float(self._capacity_bytes), max(0.0, target))
            self._gone_bytes[back_in] -= self._gone[back_in].pop(key)
        self.enter(key, OrderEntry(parent, size, back_in is not None))
        self._lists[back_in is not None][key] = None
        self._bytes[back_in is not None] += size

    def touch(self, key: bytes) -> None:
        entry = self.entries.get(key)
        if entry is None:
            return
        self._take_out(key, entry)
        if not entry.often:
            self._bytes[0] -= entry.size
            entry.often = True
            self._bytes[1] += entry.size
        self._lists[1][key] = None

    def release(self, key: bytes) -> None:
        if key in self._aside:
            del self._aside[key]
            keys = self._lists[self.entries[key].often]
            keys[key] = None
            keys.move_to_end(key, last=False)

    @property
    def aside(self) -> Collection[bytes]:
        """Keys that are skipped until they are touched or released."""
        return self._aside.keys()

    def look_again(self) -> bool:
        """Put all that was set aside back in its order; whether there was any."""
        aside = list(self._aside)
        for key in reversed(aside):
            self.release(key)
        return bool(aside)

    def coldest(self) -> Iterator[bytes]:
        """Keys in about the order in which they would go."""
        return chain(self._aside, self._lists[0], self._lists[1])

    def went_lately(self, key: bytes) -> bool:
        """Whether the chunk was evicted a short while ago: had the tier been larger, it would be here."""
        return key in self._gone[0] or key in self._gone[1]

    def remove(self, key: bytes) -> None:
        if key in self.entries:
            self._take_out(key, self.entries[key])
            entry = self.leave(key)
            self._bytes[entry.often] -= entry.size
            if entry.parent and self.is_leaf(entry.parent):
                self.release(entry.parent)

    def evict(self, is_kept: Kept) -> bytes | None:
        key = self.victim(is_kept)
        if key is not None:
            self.evicted(key)
        return key

    def victim(self, is_kept: Kept) -> bytes | None:
        """The one that `evict` would take out."""
        first = 0 if self._bytes[0] > self._target_bytes else 1
        for which in (first, 1 - first):
            keys = self._lists[which]
            while keys:
                key = next(iter(keys))
                if not is_kept(key) and (not self._leaves_only or self.is_leaf(key)):
                    return key
                self.set_aside(key)
        return None

    def evicted(self, key: bytes) -> None:
        """Take out a chunk because of its age, and remember that it was here."""
        entry = self.entries[key]
        self.remove(key)
        self._remember(int(entry.often), key, entry.size)

    def set_aside(self, key: bytes) -> None:
        """Do not look at a chunk again until it is touched or released."""
        entry = self.entries[key]
        self._take_out(key, entry)
        self._aside[key] = None

    def _take_out(self, key: bytes, entry: OrderEntry) -> None:
        if key in self._aside:
            del self._aside[key]
        else:
            del self._lists[entry.often][key]

    def _remember(self, which: int, key: bytes, size: int) -> None:
        ghosts = self._gone[which]
        ghosts[key] = size
        self._gone_bytes[which] += size
        while self._gone_bytes[which] > self._capacity_bytes:
            self._gone_bytes[which] -= ghosts.popitem(last=False)[1]
