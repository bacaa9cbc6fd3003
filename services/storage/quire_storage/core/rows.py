"""Facts about millions of chunks in columns: a chunk has a row, and each fact is an array with a value for each row.

There is no object for each chunk, which memory and the garbage collector would have to bear, and nothing that has grown
to millions of entries is ever rebuilt at once: keys are spread over small dictionaries, and arrays grow in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

_BLOCK_SHIFT: Final = 12
_BLOCK_ROWS: Final = 1 << _BLOCK_SHIFT
_GROWN_MAX: Final = 1 << 16
"""Rows by which a column grows at most: it does so within one step of the event loop."""
NO_ROW: Final = 0
"""No chunk has this row; where one is looked for, it stands for none."""


class KeyRows:
    """The row of each key. Keys are of one length, which the first one decides."""

    def __init__(self) -> None:
        self._shards: dict[int, dict[bytes, int]] = {}
        self._blocks: list[bytearray] = []  # keys by row
        self._key_bytes = 0
        self._uses = array("i", [0])
        self._free = array("i")

    def find(self, key: bytes) -> int:
        """Return the row of a key, `NO_ROW` where it has none."""
        shard = self._shards.get(_shard_of(key)) if key else None
        return shard.get(key, NO_ROW) if shard is not None else NO_ROW

    def use(self, key: bytes) -> int:
        """Return the row of a key, which it keeps until every use has ended (`end_use`)."""
        number = _shard_of(key)
        shard = self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = {}
        row = shard.get(key)
        if row is None:
            row = shard[key] = self._new_row(key)
        self._uses[row] += 1
        return row

    def find_each(self, keys: Iterable[bytes]) -> list[int]:
        """Return the row of each key, as `find` does. No key is empty."""
        shards, empty_shard = self._shards, dict[bytes, int]()
        return [shards.get(_shard_of(key), empty_shard).get(key, NO_ROW) for key in keys]

    def end_use(self, row: int) -> None:
        """Let another key have the row, once nothing uses it."""
        self._uses[row] -= 1
        if not self._uses[row]:
            key = self.key(row)
            del self._shards[_shard_of(key)][key]
            self._free.append(row)

    def key(self, row: int) -> bytes:
        """Return the key of a row."""
        at = (row & (_BLOCK_ROWS - 1)) * self._key_bytes
        return bytes(self._blocks[row >> _BLOCK_SHIFT][at : at + self._key_bytes])

    def _new_row(self, key: bytes) -> int:
        self._key_bytes = self._key_bytes or len(key)
        assert len(key) == self._key_bytes, "keys are of one length"
        if self._free:
            row = self._free.pop()
        else:
            row = len(self._uses)
            self._uses.append(0)
            if len(self._blocks) <= row >> _BLOCK_SHIFT:
                self._blocks.append(bytearray((row & (_BLOCK_ROWS - 1)) * self._key_bytes))
        at = (row & (_BLOCK_ROWS - 1)) * self._key_bytes
        self._blocks[row >> _BLOCK_SHIFT][at : at + self._key_bytes] = key
        return row


def _shard_of(key: bytes) -> int:
    """Return the number of a key's dictionary, of 1,024: ten bits of the key, which is a hash."""
    return key[-1] << 2 | key[-2] & 3


def reach(row: int, *columns: array[int]) -> None:
    """Let columns have a value for a row; new ones are 0."""
    for column in columns:
        while len(column) <= row:
            column.frombytes(bytes(column.itemsize * max(16, min(_GROWN_MAX, len(column) // 8))))


class KeyNumbers:
    """A number of each key, 0 or more."""

    def __init__(self) -> None:
        self.rows = KeyRows()
        self._numbers = array("q", [0])  # and 1 each, 0 for none
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        row = self.rows.find(key)
        return row < len(self._numbers) and self._numbers[row] != 0

    def __iter__(self) -> Iterator[bytes]:
        return (self.rows.key(row) for row in range(len(self._numbers)) if self._numbers[row])

    def get(self, key: bytes) -> int | None:
        row = self.rows.find(key)
        return self._numbers[row] - 1 if row < len(self._numbers) and self._numbers[row] else None

    def put(self, key: bytes, number: int) -> None:
        row = self.rows.use(key)
        if row >= len(self._numbers):
            reach(row, self._numbers)
        if self._numbers[row]:
            self.rows.end_use(row)  # it has one use for its number
        else:
            self._count += 1
        self._numbers[row] = number + 1

    def remove(self, key: bytes) -> None:
        """Remove the number of a key that has one."""
        row = self.rows.find(key)
        assert self._numbers[row], "it has a number"
        self._numbers[row] = 0
        self._count -= 1
        self.rows.end_use(row)


class RowLists:
    """Ordered lists of rows. A row is in one of them at most, and leaves it from any place in one step."""

    def __init__(self) -> None:
        self._list, self._previous, self._next = array("i"), array("i"), array("i")  # of each row
        self._first, self._last, self._counts = array("i", [0]), array("i", [0]), array("i", [0])  # of each list
        self._free: list[int] = []

    def new_list(self) -> int:
        """Return the number of a list that is empty, 1 or more."""
        if self._free:
            return self._free.pop()
        for ends in (self._first, self._last, self._counts):
            ends.append(0)
        return len(self._counts) - 1

    def end_list(self, number: int) -> None:
        """Let a list that is empty be another's."""
        assert not self._counts[number], "it is empty"
        self._free.append(number)

    def list_of(self, row: int) -> int:
        """Return the list that a row is in, 0 for none."""
        return self._list[row] if row < len(self._list) else 0

    def count(self, number: int) -> int:
        """Return how many rows are in a list."""
        return self._counts[number]

    def first(self, number: int) -> int:
        """Return the first row of a list, `NO_ROW` of an empty one."""
        return self._first[number]

    def put_last(self, number: int, row: int) -> None:
        """Put a row that is in no list behind all of a list."""
        last = self._last[number]
        self._enter(number, row, last, 0)
        self._last[number] = row
        if last:
            self._next[last] = row
        else:
            self._first[number] = row

    def put_first(self, number: int, row: int) -> None:
        """Put a row that is in no list before all of a list."""
        first = self._first[number]
        self._enter(number, row, 0, first)
        self._first[number] = row
        if first:
            self._previous[first] = row
        else:
            self._last[number] = row

    def move_last(self, number: int, rows: Sequence[int]) -> None:
        """Put rows behind all of a list, one after the other, from wherever they are."""
        if (top := max(rows, default=NO_ROW)) >= len(self._list):
            reach(top, self._list, self._previous, self._next)
        lists, previous, following, last = self._list, self._previous, self._next, self._last[number]
        for row in rows:
            if row == last:
                continue
            source, above, below = lists[row], previous[row], following[row]
            if source:
                self._counts[source] -= 1
                if above:
                    following[above] = below
                else:
                    self._first[source] = below
                if below:
                    previous[below] = above
                else:
                    self._last[source] = above
            lists[row], previous[row], following[row] = number, last, 0
            if last:
                following[last] = row
            else:
                self._first[number] = row
            self._counts[number] += 1
            last = row
        self._last[number] = last

    def take(self, row: int) -> int:
        """Take a row out of its list; which that was, 0 for none."""
        number = self.list_of(row)
        if number:
            previous, following = self._previous[row], self._next[row]
            if previous:
                self._next[previous] = following
            else:
                self._first[number] = following
            if following:
                self._previous[following] = previous
            else:
                self._last[number] = previous
            self._list[row] = 0
            self._counts[number] -= 1
        return number

    def rows(self, number: int) -> Iterator[int]:
        """Yield the rows of a list, which may change behind the row that was yielded."""
        row = self._first[number]
        while row:
            yield row
            row = self._next[row]

    def _enter(self, number: int, row: int, previous: int, following: int) -> None:
        if row >= len(self._list):
            reach(row, self._list, self._previous, self._next)
        self._list[row], self._previous[row], self._next[row] = number, previous, following
        self._counts[number] += 1
