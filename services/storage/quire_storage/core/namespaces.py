"""Chunks of the namespaces that a policy bounds, alone or together: what is too old, and what is too much.

Of each group of namespaces there are two orders, kept up as chunks come, are used and go: nothing is walked to find
what has to go. What was here before a group was followed is added once, some at a time (`wanted`, `add`, `walked`).

A prefix goes from its end. A chunk that others extend is set aside when its turn comes, and is next once they are gone.
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
class Found:
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
    """`aside`: what others extended when its turn came. `asked`: what was chosen, and may go."""

    next: _ByUse | _ByAge
    aside: dict[bytes, None] = field(default_factory=dict)
    asked: dict[bytes, None] = field(default_factory=dict)

    def remove(self, key: bytes) -> None:
        self.next.remove(key)
        self.aside.pop(key, None)
        self.asked.pop(key, None)

    def release(self, key: bytes) -> None:
        """Nothing extends it any more."""
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
    """Follows the groups that it was told to follow."""

    def __init__(self) -> None:
        self._followed: dict[Group, _Followed] = {}
        self._of: dict[bytes, list[_Followed]] = {}

    def follow(self, groups: Iterable[Group]) -> None:
        """Follow exactly these groups. A group that has gained a namespace keeps what is known of it."""
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

    def add(self, chunks: Iterable[Found], is_here: Callable[[bytes], bool]) -> None:
        """Of wanted namespaces what was here before they were followed; the last stored first. What has come since, or
        has gone, stays as it is.
        """
        for chunk in chunks:
            for followed in self._of.get(chunk.namespace, ()):
                if chunk.namespace in followed.unknown and chunk.key not in followed.about and is_here(chunk.key):
                    followed.enter(chunk.key, chunk.parent, chunk.size, chunk.stored_ms)
                    followed.by_age.next.put_first(chunk.key)
                    followed.by_use.next.put_first(chunk.key)

    def walked(self, namespaces: Iterable[bytes]) -> None:
        """All chunks of these namespaces have been added."""
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
        """A chunk was read: it goes last in the order of use."""
        for followed in self._of.get(chunk.namespace, ()):
            if chunk.key in followed.by_use.next:
                followed.by_use.next.put_last(chunk.key)

    def left(self, chunk: Chunk) -> None:
        """A chunk is not here any more."""
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
        """Keys of some of the least recently used that nothing extends, while they take up what is over the quota."""
        followed = self._followed[group]
        return followed.first(
            followed.by_use, lambda _, chosen: not followed.unknown and followed.size - chosen > quota_bytes
        )
