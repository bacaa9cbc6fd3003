"""Chunks of the namespaces that a policy bounds, alone or together: expired chunks, and chunks over the quota.

Of each group of namespaces there are two orders, kept up as chunks are stored, used and removed: no walk is needed to
find the ones to evict. Chunks that were here before a group was followed are added once, some at a time (`wanted`,
`add`, `walked`).

A prefix is evicted from its end. A chunk that others extend is set aside when its turn comes, and is next once they are
removed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import Final

from quire_storage.core.chunks import Chunk

Group = frozenset[bytes]
"""Namespaces that a policy bounds together, each by the first 16 bytes of its digest."""
_CHOSEN_MAX: Final = 64
_LOOKS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """A chunk that is here; `size`: bytes that it takes up."""

    key: bytes
    parent: bytes
    namespace: bytes
    size: int
    stored_ms: int


class _ByUse:
    """The least recently used first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def first(self) -> bytes | None:
        return next(iter(self._keys), None)

    def remove(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def put_first(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key, last=False)

    def put_last(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)


class _ByAge:
    """Keys by the second in which they were stored, the earliest first. `second_of`: that second of a key."""

    def __init__(self, second_of: Callable[[bytes], int]) -> None:
        self._second_of = second_of
        self._keys: dict[int, OrderedDict[bytes, None]] = {}
        self._seconds: list[int] = []

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._keys.values())

    def first(self) -> bytes | None:
        while self._seconds:
            keys = self._keys[self._seconds[0]]
            if keys:
                return next(iter(keys))
            del self._keys[heappop(self._seconds)]
        return None

    def remove(self, key: bytes) -> None:
        keys = self._keys.get(self._second_of(key))
        if keys is not None:
            keys.pop(key, None)

    def put(self, key: bytes) -> None:
        second = self._second_of(key)
        if second not in self._keys:
            self._keys[second] = OrderedDict()
            heappush(self._seconds, second)
        self._keys[second][key] = None

    put_first = put_last = put


@dataclass(slots=True)
class _Order:
    """`aside`: chunks that others extended when their turn came. `asked`: chosen chunks."""

    next: _ByUse | _ByAge
    aside: dict[bytes, None] = field(default_factory=dict)
    asked: dict[bytes, None] = field(default_factory=dict)

    def remove(self, key: bytes) -> None:
        self.next.remove(key)
        self.aside.pop(key, None)
        self.asked.pop(key, None)

    def release(self, key: bytes) -> None:
        """Note that no chunk extends it now."""
        if key in self.aside:
            del self.aside[key]
            self.next.put_first(key)


class _Followed:
    """`about`: key → (parent, bytes taken up, stored at). `extended`: how many chunks that are here extend a key."""

    def __init__(self) -> None:
        self.unknown: set[bytes] = set()
        self.about: dict[bytes, tuple[bytes, int, int]] = {}
        self.extended: Counter[bytes] = Counter()
        self.by_age = _Order(_ByAge(lambda key: self.about[key][2] // 1000))
        self.by_use = _Order(_ByUse())
        self.size = 0

    def enter(self, key: bytes, parent: bytes, size: int, stored_ms: int) -> None:
        self.about[key] = (parent, size, stored_ms)
        self.size += size
        if parent:
            self.extended[parent] += 1

    def leave(self, key: bytes) -> None:
        self.by_age.remove(key)
        self.by_use.remove(key)
        parent, size, _ = self.about.pop(key)
        self.size -= size
        if parent:
            self.extended[parent] -= 1
            if not self.extended[parent]:
                del self.extended[parent]
                self.by_age.release(parent)
                self.by_use.release(parent)

    def first(self, order: _Order, is_wanted: Callable[[bytes, int], bool]) -> list[bytes]:
        """Take some keys from the front of `order`, children before parents; no other chunk here extends them.

        They have no turn again until `put_back`. `is_wanted`: key, and bytes chosen before.
        """
        chosen, size, going = list[bytes](), 0, Counter[bytes]()
        for _ in range(_LOOKS_MAX):
            key = order.next.first()
            if key is None or len(chosen) == _CHOSEN_MAX or not is_wanted(key, size):
                break
            order.next.remove(key)
            if self.extended[key] > going[key]:
                order.aside[key] = None
                continue
            chosen.append(key)
            order.asked[key] = None
            parent, taken, _ = self.about[key]
            size += taken
            going[parent] += 1
            if self.extended[parent] == going[parent]:
                order.release(parent)
        return chosen


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
                if chunk.namespace in followed.unknown and chunk.key not in followed.about and is_here(chunk.key):
                    followed.enter(chunk.key, chunk.parent, chunk.size, chunk.stored_ms)
                    followed.by_age.next.put_first(chunk.key)
                    followed.by_use.next.put_first(chunk.key)

    def walked(self, namespaces: Iterable[bytes]) -> None:
        """Note that the chunks of these namespaces have all been added."""
        for followed in self._followed.values():
            followed.unknown.difference_update(namespaces)

    def entered(self, chunks: Sequence[Chunk]) -> None:
        """Chunks are here, parents before children."""
        for chunk in chunks:
            for followed in self._of.get(chunk.namespace, ()):
                if chunk.key not in followed.about:
                    followed.enter(chunk.key, chunk.record.parent, chunk.shape.slot_bytes, chunk.stored_ms)
                    followed.by_age.next.put_last(chunk.key)
                    followed.by_use.next.put_last(chunk.key)

    def used(self, chunk: Chunk) -> None:
        """Note a read: the chunk is last in the order of use."""
        for followed in self._of.get(chunk.namespace, ()):
            if chunk.key in followed.by_use.next:
                followed.by_use.next.put_last(chunk.key)

    def left(self, chunk: Chunk) -> None:
        """Remove a chunk."""
        for followed in self._of.get(chunk.namespace, ()):
            if chunk.key in followed.about:
                followed.leave(chunk.key)

    def put_back(self, group: Group) -> None:
        """Queue chosen chunks that are still here again: they are leased, or chunks on other nodes extend them."""
        followed = self._followed[group]
        for order in (followed.by_age, followed.by_use):
            for key in order.asked:
                order.next.put_last(key)
            order.asked = {}

    def expired(self, group: Group, cutoff_ms: int) -> list[bytes]:
        """Keys of some that were stored before `cutoff_ms` (Unix epoch), to the second, and that nothing extends."""
        followed = self._followed[group]
        return followed.first(
            followed.by_age, lambda key, _: not followed.unknown and followed.about[key][2] < cutoff_ms
        )

    def excess(self, group: Group, quota_bytes: int) -> list[bytes]:
        """Keys of some of the least recently used that nothing extends, as long as the total is over the quota."""
        followed = self._followed[group]
        return followed.first(
            followed.by_use, lambda _, chosen: not followed.unknown and followed.size - chosen > quota_bytes
        )
