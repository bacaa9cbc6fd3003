"""Values that take memory, up to a bound; the least recently used is discarded first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Bounded(Generic[Key, Value]):
    """Values by key.

    Args:
        bytes_max: Bound of the sum of their sizes.
        on_discard: Called after values were discarded.
    """

    def __init__(self, bytes_max: int, on_discard: Callable[[], None] = lambda: None) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._on_discard = on_discard
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return a value, which counts as a use of it; None if it is not there."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Key, value: Value, size: int) -> bool:
        """Add a value of `size` bytes; return False, and add nothing, where it alone is larger than the bound."""
        if size > self.bytes_max:
            return False
        self.make_room(size)
        self._values[key] = value, size
        self.bytes += size
        return True

    def make_room(self, size: int) -> None:
        """Discard values until `size` bytes more fit."""
        count = len(self._values)
        while self._values and self.bytes + size > self.bytes_max:
            _, (_, freed) = self._values.popitem(last=False)
            self.bytes -= freed
        if len(self._values) < count:
            self._on_discard()

    def discard(self, matches: Callable[[Key], bool]) -> None:
        """Discard the values of matching keys."""
        keys = [key for key in self._values if matches(key)]
        for key in keys:
            self.bytes -= self._values.pop(key)[1]
        if keys:
            self._on_discard()
