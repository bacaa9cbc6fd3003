"""One tier of the cache: a main segment and a thin tail, in some order of replacement (LatentBox, §4.3).

What leaves the main segment enters the tail, what leaves the tail leaves the tier. A hit in the tail is one that a
slightly smaller tier would not have had: the rate of such hits is what the last bytes of the tier are worth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Tier(Protocol[Key]):
    """Keys with sizes, within a capacity in bytes."""

    @property
    def used_bytes(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: Key) -> bool: ...
    def hit(self, key: Key) -> bool | None:
        """Use `key`: True if it was in the tail, False if in the main segment, None if it is not here."""

    def insert(self, key: Key, size: int) -> list[Key]:
        """Take in a key that is not here; what had to leave for it. It leaves at once itself if it is too large."""

    def remove(self, key: Key) -> int:
        """Take out; its size, 0 if it was not here."""

    def resize(self, capacity_bytes: int) -> list[Key]:
        """Another capacity; what had to leave for it."""


class _Tail(Generic[Key]):
    """What both orders share: the tail, a queue, and the sizes of all."""

    def __init__(self, capacity_bytes: int, tail_share: float) -> None:
        if not 0 < tail_share < 1:
            raise ValueError(f"tail share {tail_share}")
        self._tail_share = tail_share
        self._sizes: dict[Key, int] = {}
        self._tail: OrderedDict[Key, None] = OrderedDict()
        self._main_bytes = self._tail_bytes = 0
        self.capacity_bytes = capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._main_bytes + self._tail_bytes

    @property
    def _main_bytes_max(self) -> int:
        return int(self.capacity_bytes * (1 - self._tail_share))

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def _to_tail(self, key: Key) -> None:
        size = self._sizes[key]
        self._main_bytes -= size
        self._tail_bytes += size
        self._tail[key] = None

    def _from_tail(self, key: Key) -> int:
        del self._tail[key]
        size = self._sizes[key]
        self._tail_bytes -= size
        return size

    def _trim_tail(self) -> list[Key]:
        """The main segment may leave room unused; the tail then has it."""
        gone = []
        while self._tail and self.used_bytes > self.capacity_bytes:
            key, _ = self._tail.popitem(last=False)
            self._tail_bytes -= self._sizes.pop(key)
            gone.append(key)
        return gone


class LruTier(_Tail[Key]):
    """Least recently used first, as in the paper."""

    def __init__(self, capacity_bytes: int, tail_share: float) -> None:
        super().__init__(capacity_bytes, tail_share)
        self._main: OrderedDict[Key, None] = OrderedDict()

    def hit(self, key: Key) -> bool | None:
        if key in self._main:
            self._main.move_to_end(key)
            return False
        if key in self._tail:
            self._main_bytes += self._from_tail(key)
            self._main[key] = None
            self._shrink()
            return True
        return None

    def insert(self, key: Key, size: int) -> list[Key]:
        if size > self._main_bytes_max:
            return [key]
        self._sizes[key] = size
        self._main[key] = None
        self._main_bytes += size
        self._shrink()
        return self._trim_tail()

    def remove(self, key: Key) -> int:
        if key not in self._sizes:
            return 0
        if key in self._tail:
            self._from_tail(key)
        else:
            del self._main[key]
            self._main_bytes -= self._sizes[key]
        return self._sizes.pop(key)

    def resize(self, capacity_bytes: int) -> list[Key]:
        self.capacity_bytes = capacity_bytes
        self._shrink()
        return self._trim_tail()

    def _shrink(self) -> None:
        while self._main_bytes > self._main_bytes_max:
            key, _ = self._main.popitem(last=False)
            self._to_tail(key)


class SieveTier(_Tail[Key]):
    """SIEVE (Zhang et al., NSDI '24): a queue that a hand walks from old to new, sparing once what was used.

    A hit moves nothing, it only marks: what is used once does not push out what is used often.
    """

    def __init__(self, capacity_bytes: int, tail_share: float) -> None:
        super().__init__(capacity_bytes, tail_share)
        # Old to new. The hand is a second queue: what it has passed waits there, in order, until it starts anew.
        self._ahead: OrderedDict[Key, None] = OrderedDict()
        self._passed: OrderedDict[Key, None] = OrderedDict()
        self._used: set[Key] = set()

    def hit(self, key: Key) -> bool | None:
        if key in self._tail:
            if self._sizes[key] > self._main_bytes_max:  # the tier has shrunk since
                self._tail.move_to_end(key)
                return True
            size = self._from_tail(key)
            self._shrink(self._main_bytes_max - size)
            self._main_bytes += size
            self._ahead[key] = None
            return True
        if key in self._sizes:
            self._used.add(key)
            return False
        return None

    def insert(self, key: Key, size: int) -> list[Key]:
        if size > self._main_bytes_max:
            return [key]
        # Room first: the hand must not meet the newcomer, which cannot have been used yet.
        self._shrink(self._main_bytes_max - size)
        self._sizes[key] = size
        self._ahead[key] = None
        self._main_bytes += size
        return self._trim_tail()

    def remove(self, key: Key) -> int:
        if key not in self._sizes:
            return 0
        if key in self._tail:
            self._from_tail(key)
        else:
            self._ahead.pop(key, None)
            self._passed.pop(key, None)
            self._used.discard(key)
            self._main_bytes -= self._sizes[key]
        return self._sizes.pop(key)

    def resize(self, capacity_bytes: int) -> list[Key]:
        self.capacity_bytes = capacity_bytes
        self._shrink(self._main_bytes_max)
        return self._trim_tail()

    def _shrink(self, bytes_max: int) -> None:
        while self._main_bytes > bytes_max:
            if not self._ahead:
                self._ahead, self._passed = self._passed, self._ahead
            key, _ = self._ahead.popitem(last=False)
            if key in self._used:
                self._used.discard(key)
                self._passed[key] = None
            else:
                self._to_tail(key)
