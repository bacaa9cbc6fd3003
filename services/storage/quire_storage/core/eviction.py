"""Choice of the chunk to evict from a full tier. Pure; `quire bench cache` runs this very class over a trace.

`LeafArc` is ARC (Megiddo and Modha, FAST '03) on a forest. Chunks that were used once and chunks that were used more
often are two lists, each in order of use; how much of the tier belongs to which adapts to the keys that come back soon
after their eviction. So a scan passes through the first list, and a conversation that goes on moves to the second.

From the lowest tier only leaves are evicted, chunks that no chunk in the tier extends: so its content stays a set of
whole prefixes, and the cluster's index prefix-closed. An unused prefix unwinds from its end.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from quire_storage.core.rows import NO_ROW, KeyRows, RowLists, reach

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


class LeafArc:
    """Adapts within `capacity_bytes`, which is not a limit: the caller evicts as it needs room.

    Children may enter before their parents.

    Args:
        capacity_bytes: Of the tier.
        leaves_only: False for a tier that has another below it.
        rows: Rows of keys to share with what else knows about the same chunks.
    """

    def __init__(self, capacity_bytes: int, *, leaves_only: bool = True, rows: KeyRows | None = None) -> None:
        self._leaves_only = leaves_only
        self._capacity_bytes = capacity_bytes
        self._rows = KeyRows() if rows is None else rows
        self._lists = RowLists()
        self._orders = self._lists.new_list(), self._lists.new_list()  # chunks that were used once, and more often
        self._aside = self._lists.new_list()
        self._gone = self._lists.new_list(), self._lists.new_list()  # evicted ones, by the list that they were in
        self._parents, self._children, self._sizes = array("i"), array("i"), array("q")
        self._often = array("b")
        self._bytes = [0, 0]
        self._gone_bytes = [0, 0]
        self._target_bytes = 0.0  # of the first list

    @property
    def used_bytes(self) -> int:
        return sum(self._bytes)

    def __contains__(self, key: bytes) -> bool:
        return self._row(key) != NO_ROW

    def __len__(self) -> int:
        return sum(map(self._lists.count, (*self._orders, self._aside)))

    def __iter__(self) -> Iterator[bytes]:
        rows = chain.from_iterable(map(self._lists.rows, (*self._orders, self._aside)))
        return map(self._rows.key, rows)

    def is_leaf(self, key: bytes) -> bool:
        """Whether nothing here extends it."""
        row = self._rows.find(key)
        return row >= len(self._children) or not self._children[row]

    def insert(self, key: bytes, parent: bytes, size: int) -> None:
        assert key not in self, "a chunk enters a tier once"
        self.enter([(key, parent, size)])

    def enter(self, chunks: Sequence[tuple[bytes, bytes, int]]) -> None:
        """Enter distinct chunks, (key, parent, size), in order. A chunk that is already in the tier keeps its place."""
        rows, lists = [self._rows.use(key) for key, _, _ in chunks], self._lists
        assert len(set(rows)) == len(rows), "a chunk enters once"
        self._reach(max(rows, default=NO_ROW))
        parents, sizes, marks = self._parents, self._sizes, self._often
        orders: tuple[list[int], list[int]] = ([], [])
        for row, (_, parent, size) in zip(rows, chunks, strict=True):
            was_in = lists.list_of(row)
            if was_in and was_in not in self._gone:
                self._rows.end_use(row)
                continue
            if was_in:
                self._came_back(row, size)
            often = was_in != 0
            parents[row] = self._extended(parent) if parent else NO_ROW
            sizes[row], marks[row] = size, often
            self._bytes[often] += size
            orders[often].append(row)
        for order, entering in zip(self._orders, orders, strict=True):
            lists.move_last(order, entering)

    def put_back(self, key: bytes, parent: bytes, size: int) -> None:
        """Enter a chunk again that was taken out by `evicted` and stays after all: it is the oldest of its list.

        It does not count as used, and the target stays.
        """
        row, lists = self._rows.use(key), self._lists
        was_in = lists.list_of(row)
        assert not was_in or was_in in self._gone, "it was taken out"
        self._reach(row)
        often = was_in == self._gone[1]
        if was_in:
            lists.take(row)
            self._gone_bytes[often] -= self._sizes[row]
            self._rows.end_use(row)
        self._parents[row] = self._extended(parent) if parent else NO_ROW
        self._sizes[row], self._often[row] = size, often
        self._bytes[often] += size
        lists.put_first(self._orders[often], row)

    def _reach(self, row: int) -> None:
        """Let columns have a value for a row."""
        if row >= len(self._often):
            reach(row, self._parents, self._children, self._sizes, self._often)

    def _extended(self, parent: bytes) -> int:
        """Count one more child of a chunk. Returns the chunk's row."""
        row = self._rows.use(parent)
        self._reach(row)
        self._children[row] += 1
        return row

    def _came_back(self, row: int, size: int) -> None:
        """Adapt the target to a chunk that returns soon after its eviction."""
        which = self._gone.index(self._lists.take(row))
        length, other_length = self._lists.count(self._gone[which]) + 1, self._lists.count(self._gone[1 - which])
        step = size * max(1.0, other_length / length)
        target = self._target_bytes + (step if which == 0 else -step)
        self._target_bytes = min(float(self._capacity_bytes), max(0.0, target))
        self._gone_bytes[which] -= self._sizes[row]
        self._rows.end_use(row)

    def touch(self, key: bytes) -> None:
        self.touch_each([key])

    def touch_each(self, keys: Iterable[bytes]) -> None:
        """Touch chunks, one after the other; those that are not in are ignored."""
        list_of, ghosts = self._lists.list_of, self._gone
        rows = [row for row in self._rows.find_each(keys) if (number := list_of(row)) and number not in ghosts]
        for row in rows:
            if not self._often[row]:
                self._bytes[0] -= self._sizes[row]
                self._bytes[1] += self._sizes[row]
                self._often[row] = True
        self._lists.move_last(self._orders[1], rows)

    def release(self, key: bytes) -> None:
        if self._lists.count(self._aside):
            self._release(self._rows.find(key))

    @property
    def has_aside(self) -> bool:
        """Whether a chunk is set aside."""
        return self._lists.count(self._aside) > 0

    @property
    def aside(self) -> list[bytes]:
        """Keys that are skipped until they are touched or released."""
        return [self._rows.key(row) for row in self._lists.rows(self._aside)]

    def look_again(self) -> bool:
        """Put all that was set aside back in its order; whether there was any."""
        aside = list(self._lists.rows(self._aside))
        for row in reversed(aside):
            self._release(row)
        return bool(aside)

    def went_lately(self, key: bytes) -> bool:
        """Whether the chunk was evicted a short while ago: had the tier been larger, it would be here."""
        return self._lists.list_of(self._rows.find(key)) in self._gone

    def remove(self, key: bytes) -> None:
        row = self._row(key)
        if row:
            self._leave(row)
            self._rows.end_use(row)

    def evict(self, is_kept: Kept) -> bytes | None:
        key = self.victim(is_kept)
        if key is not None:
            self.evicted(key)
        return key

    def victim(self, is_kept: Kept) -> bytes | None:
        """The one that `evict` would take out."""
        first = 0 if self._bytes[0] > self._target_bytes else 1
        for order in (self._orders[first], self._orders[1 - first]):
            while row := self._lists.first(order):
                key = self._rows.key(row)
                if not is_kept(key) and (not self._leaves_only or not self._children[row]):
                    return key
                self._set_aside(row)
        return None

    def evicted(self, key: bytes) -> None:
        """Take out a chunk because of its age, and remember that it was here."""
        row = self._row(key)
        assert row, "it is in"
        self._leave(row)
        which = self._often[row]
        self._lists.put_last(self._gone[which], row)
        self._gone_bytes[which] += self._sizes[row]
        while self._gone_bytes[which] > self._capacity_bytes:
            oldest = self._lists.first(self._gone[which])
            self._lists.take(oldest)
            self._gone_bytes[which] -= self._sizes[oldest]
            self._rows.end_use(oldest)

    def set_aside(self, key: bytes) -> None:
        """Do not look at a chunk again until it is touched or released."""
        row = self._row(key)
        assert row, "it is in"
        self._set_aside(row)

    def _set_aside(self, row: int) -> None:
        self._lists.take(row)
        self._lists.put_last(self._aside, row)

    def _row(self, key: bytes) -> int:
        """Return the row of a chunk that is in, or `NO_ROW`."""
        row = self._rows.find(key)
        number = self._lists.list_of(row)
        return row if number and number not in self._gone else NO_ROW

    def _release(self, row: int) -> None:
        if self._lists.list_of(row) == self._aside:
            self._lists.take(row)
            self._lists.put_first(self._orders[self._often[row]], row)

    def _leave(self, row: int) -> None:
        self._lists.take(row)
        self._bytes[self._often[row]] -= self._sizes[row]
        parent = self._parents[row]
        if parent:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._release(parent)
            self._rows.end_use(parent)
