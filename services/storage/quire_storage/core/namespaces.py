"""Chunks of the namespaces that a policy bounds, alone or together: expired chunks, and chunks over the quota.

Of each group of namespaces there are two orders, kept up as chunks are stored, used and removed: no walk is needed to
find the ones to evict. Chunks that were here before a group was followed are added once, some at a time (`wanted`,
`add`, `walked`).

A prefix is evicted from its end. A chunk that others extend is set aside when its turn comes, and is next once they are
removed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from quire_storage.core.chunks import Chunk
from quire_storage.core.rows import NO_ROW, KeyRows, RowLists, reach

Group = frozenset[bytes]
"""Namespaces that a policy bounds together, each by the first 16 bytes of its digest."""
_CHOSEN_MAX: Final = 64
_LOOKS_MAX: Final = 512  # at a time: about a millisecond


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """A chunk that is here; `size`: bytes that it takes up."""

    key: bytes
    parent: bytes
    namespace: bytes
    size: int
    stored_ms: int


class _Followed:
    """Chunks of a group, a row each. `extended`: how many chunks that are here extend a row's.

    A row is in one list of each of two orders: by the second in which the chunk was stored, and by its last use; or in
    the order's list of those that others extended when their turn came, or of those that were chosen.
    """

    def __init__(self) -> None:
        self.unknown: set[bytes] = set()
        self.rows = KeyRows()
        self.here = array("b")
        self.parents, self.extended = array("i"), array("i")
        self.sizes, self.stored_ms = array("q"), array("q")
        self.by_age = _Order(lambda row: self.stored_ms[row] // 1000)
        self.by_use = _Order(lambda row: 0)
        self.size = 0

    def __contains__(self, key: bytes) -> bool:
        row = self.rows.find(key)
        return row < len(self.here) and self.here[row] != 0

    def enter(self, key: bytes, parent: bytes, size: int, stored_ms: int, *, first: bool) -> None:
        """Add a chunk, as the first or the last in both orders."""
        row = self._reached(self.rows.use(key))
        self.here[row], self.sizes[row], self.stored_ms[row] = 1, size, stored_ms
        self.size += size
        self.parents[row] = above = self._reached(self.rows.use(parent)) if parent else NO_ROW
        if above:
            self.extended[above] += 1
        for order in (self.by_age, self.by_use):
            order.put(row, first=first)

    def leave(self, key: bytes) -> None:
        row = self.rows.find(key)
        self.here[row] = 0
        self.size -= self.sizes[row]
        for order in (self.by_age, self.by_use):
            order.take(row)
        above = self.parents[row]
        if above:
            self.extended[above] -= 1
            if not self.extended[above]:
                self.by_age.release(above)
                self.by_use.release(above)
            self.rows.end_use(above)
        self.rows.end_use(row)

    def used(self, key: bytes) -> None:
        """Make a chunk the last in the order of use, unless it was chosen or set aside."""
        row = self.rows.find(key)
        if self.by_use.is_queued(row):
            self.by_use.take(row)
            self.by_use.put(row)

    def first(self, order: _Order, is_wanted: Callable[[int, int], bool]) -> list[bytes] | None:
        """Take some keys from the front of `order`, children before parents; no other chunk here extends them.

        They have no turn again until `put_back`. An empty list: none was found so far; None: there is none.
        `is_wanted`: of a row, and bytes chosen before.
        """
        chosen, size, going = list[int](), 0, Counter[int]()
        for _ in range(_LOOKS_MAX):
            row = order.first()
            if row == NO_ROW or not is_wanted(row, size):
                if not chosen:
                    return None
                break
            if len(chosen) == _CHOSEN_MAX:
                break
            if self.extended[row] > going[row]:
                order.set_aside(row)
                continue
            order.choose(row)
            chosen.append(row)
            size += self.sizes[row]
            above = self.parents[row]
            going[above] += 1
            if self.extended[above] == going[above]:
                order.release(above)
        return [self.rows.key(row) for row in chosen]

    def _reached(self, row: int) -> int:
        if row >= len(self.here):
            reach(row, self.here, self.parents, self.extended, self.sizes, self.stored_ms)
        return row


class _Order:
    """Rows by rank, the lowest first; of one rank in the order in which they were put.

    Rows that are set aside have no turn until they are released, chosen ones until they are put back.
    """

    def __init__(self, rank_of: Callable[[int], int]) -> None:
        self._rank_of = rank_of
        self._lists = RowLists()
        self._aside, self._chosen = self._lists.new_list(), self._lists.new_list()
        self._ranks: dict[int, int] = {}  # lists by rank
        self._lowest: list[int] = []

    def first(self) -> int:
        """Return the first row, `NO_ROW` if there is none."""
        while self._lowest:
            number = self._ranks[self._lowest[0]]
            if row := self._lists.first(number):
                return row
            self._lists.end_list(number)
            del self._ranks[heappop(self._lowest)]
        return NO_ROW

    def is_queued(self, row: int) -> bool:
        """Whether a row is here, and neither set aside nor chosen."""
        return self._lists.list_of(row) not in (0, self._aside, self._chosen)

    def put(self, row: int, *, first: bool = False) -> None:
        """Put a row behind all of its rank, or before them."""
        rank = self._rank_of(row)
        number = self._ranks.get(rank)
        if number is None:
            number = self._ranks[rank] = self._lists.new_list()
            heappush(self._lowest, rank)
        if first:
            self._lists.put_first(number, row)
        else:
            self._lists.put_last(number, row)

    def take(self, row: int) -> None:
        """Take a row out, wherever it is."""
        self._lists.take(row)

    def set_aside(self, row: int) -> None:
        self._lists.take(row)
        self._lists.put_last(self._aside, row)

    def release(self, row: int) -> None:
        """Note that no chunk extends it now."""
        if self._lists.list_of(row) == self._aside:
            self._lists.take(row)
            self.put(row, first=True)

    def choose(self, row: int) -> None:
        self._lists.take(row)
        self._lists.put_last(self._chosen, row)

    def put_back(self) -> None:
        """Queue chosen rows that are still here again."""
        while row := self._lists.first(self._chosen):
            self._lists.take(row)
            self.put(row)


class NamespaceBook:
    """Orders of the groups that have policies."""

    def __init__(self) -> None:
        self._followed: dict[Group, _Followed] = {}
        self._of: dict[bytes, list[_Followed]] = {}

    def follow(self, groups: Iterable[Group]) -> None:
        """Follow exactly these groups. A group that has gained a namespace keeps its orders."""
        previous, self._followed, self._of = self._followed, {}, {}
        for group in sorted(groups, key=lambda group_: group_ not in previous):
            base = max((group_ for group_ in previous if group_ <= group), key=len, default=Group())
            followed = previous.pop(base) if base else _Followed()
            followed.unknown |= group - base
            self._followed[group] = followed
            for namespace in group:
                self._of.setdefault(namespace, []).append(followed)

    @property
    def wanted(self) -> frozenset[bytes]:
        """Namespaces whose chunks on this node have not been added yet."""
        return frozenset(namespace for followed in self._followed.values() for namespace in followed.unknown)

    def add(self, chunks: Iterable[ChunkFacts], is_here: Callable[[bytes], bool]) -> None:
        """Add chunks of wanted namespaces from before they were followed, the last stored first.

        Chunks that were stored or removed since stay unchanged.
        """
        for chunk in chunks:
            for followed in self._of.get(chunk.namespace, ()):
                if chunk.namespace in followed.unknown and chunk.key not in followed and is_here(chunk.key):
                    followed.enter(chunk.key, chunk.parent, chunk.size, chunk.stored_ms, first=True)

    def walked(self, namespaces: Iterable[bytes]) -> None:
        """Note that the chunks of these namespaces have all been added."""
        for followed in self._followed.values():
            followed.unknown.difference_update(namespaces)

    def entered(self, chunks: Sequence[Chunk]) -> None:
        """Chunks are here, parents before children."""
        for chunk in chunks if self._of else ():
            for followed in self._of.get(chunk.namespace, ()):
                if chunk.key not in followed:
                    parent, size = chunk.record.parent, chunk.shape.slot_bytes
                    followed.enter(chunk.key, parent, size, chunk.stored_ms, first=False)

    def used(self, chunks: Iterable[Chunk]) -> None:
        """Note reads, one after the other: each chunk is last in the order of use then."""
        if self._of:
            for chunk in chunks:
                for followed in self._of.get(chunk.namespace, ()):
                    followed.used(chunk.key)

    def left(self, chunk: Chunk) -> None:
        """Remove a chunk."""
        for followed in self._of.get(chunk.namespace, ()):
            if chunk.key in followed:
                followed.leave(chunk.key)

    def put_back(self, group: Group) -> None:
        """Queue chosen chunks that are still here again: they are leased, or chunks on other nodes extend them."""
        followed = self._followed[group]
        followed.by_age.put_back()
        followed.by_use.put_back()

    def expired(self, group: Group, cutoff_ms: int) -> list[bytes] | None:
        """Return keys of some that were stored before `cutoff_ms` (Unix epoch) and that nothing extends; see `excess`.

        To the second.
        """
        followed = self._followed[group]
        return followed.first(
            followed.by_age, lambda row, _: not followed.unknown and followed.stored_ms[row] < cutoff_ms
        )

    def excess(self, group: Group, quota_bytes: int) -> list[bytes] | None:
        """Return keys of some of the least recently used that nothing extends, while the total is over the quota.

        None where there are none; an empty list where others have to be looked at.
        """
        followed = self._followed[group]
        return followed.first(
            followed.by_use, lambda _, chosen: not followed.unknown and followed.size - chosen > quota_bytes
        )
