"""Chunks of the namespaces that a policy bounds, alone or together: what is too old, and what is too much.

Two orders for each group of namespaces, kept up as chunks come, are used and go, so that a look costs no walk over the
others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quire_storage.core.chunks import Chunk

Group = frozenset[bytes]
"""Namespaces that a policy bounds together, each by the first 16 bytes of its digest."""


@dataclass(slots=True)
class _Orders:
    """`by_age`: key → (bytes taken up, stored at), the longest stored first. `by_use`: least recently used first."""

    by_age: OrderedDict[bytes, tuple[int, int]] = field(default_factory=OrderedDict)
    by_use: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    bytes: int = 0


class NamespaceBook:
    """Follows the groups that it was told to follow."""

    def __init__(self) -> None:
        self._followed: dict[Group, _Orders] = {}
        self._of: dict[bytes, list[_Orders]] = {}

    def follow(
        self,
        groups: Iterable[Group],
        found: Callable[[bytes], list[tuple[bytes, int, int]]],
        coldest: Callable[[], Iterable[bytes]],
    ) -> list[bytes]:
        """Follow these and no others; the namespaces that are new in one.

        `found`: (key, bytes taken up, stored at) of what is here of a namespace, the longest stored first; `coldest`:
        keys, also of other namespaces, in the order in which they would be evicted.
        """
        before, self._followed = self._followed, {}
        new: dict[bytes, None] = {}
        for group in sorted(groups, key=lambda each: each not in before):
            # One that has grown is not walked again: a tenant stores in one more namespace.
            base = max((each for each in before if each <= group), key=len, default=Group())
            orders = before.pop(base) if base else _Orders()
            added = [entry for namespace in sorted(group - base) for entry in found(namespace)]
            if added:
                _add(orders, added, coldest())
            new.update(dict.fromkeys(group - base))
            self._followed[group] = orders
        self._of = {}
        for group, orders in self._followed.items():
            for namespace in group:
                self._of.setdefault(namespace, []).append(orders)
        return list(new)

    def entered(self, chunks: Sequence[Chunk]) -> None:
        """Chunks are here, parents before children: of these the deepest counts as the least recently used."""
        for chunk in chunks:
            for mine in self._of.get(chunk.namespace, ()):
                if chunk.key not in mine.by_age:
                    mine.by_age[chunk.key] = (chunk.shape.slot_bytes, chunk.stored_ms)
                    mine.bytes += chunk.shape.slot_bytes
        for chunk in reversed(chunks):
            for mine in self._of.get(chunk.namespace, ()):
                mine.by_use.setdefault(chunk.key, None)

    def used(self, chunk: Chunk) -> None:
        for mine in self._of.get(chunk.namespace, ()):
            if chunk.key in mine.by_use:
                mine.by_use.move_to_end(chunk.key)

    def left(self, chunk: Chunk) -> None:
        for mine in self._of.get(chunk.namespace, ()):
            if chunk.key in mine.by_age:
                mine.bytes -= mine.by_age.pop(chunk.key)[0]
                del mine.by_use[chunk.key]

    def expired(self, group: Group, cutoff_ms: int) -> list[bytes]:
        """Keys of what was stored before `cutoff_ms` (Unix epoch), the last stored first: children before parents.

        Of a group of one namespace: others are in the order in which they came to be followed.
        """
        found = []
        for key, (_, stored_ms) in self._followed[group].by_age.items():
            if stored_ms >= cutoff_ms:
                break
            found.append(key)
        return found[::-1]

    def excess(self, group: Group, quota_bytes: int) -> list[bytes]:
        """Keys of the least recently used, as many as take up what is over the quota."""
        mine, chosen = self._followed[group], list[bytes]()
        left = mine.bytes - quota_bytes
        for key in mine.by_use:
            if left <= 0:
                break
            chosen.append(key)
            left -= mine.by_age[key][0]
        return chosen


def _add(mine: _Orders, found: Iterable[tuple[bytes, int, int]], coldest: Iterable[bytes]) -> None:
    for key, size, stored_ms in found:
        mine.by_age[key] = (size, stored_ms)
        mine.bytes += size
    mine.by_use.update((key, None) for key in coldest if key in mine.by_age)
    mine.by_use.update((key, None) for key in reversed(mine.by_age) if key not in mine.by_use)
