"""Chunks by namespace, for those namespaces that a policy bounds: what is too old, and what is too much.

Two orders for each, kept up as chunks come, are used and go, so that a look costs no walk over the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire_storage.core.chunks import Chunk


@dataclass(slots=True)
class _Namespace:
    """`by_age`: key → (bytes taken up, stored at), the longest stored first. `by_use`: least recently used first."""

    by_age: OrderedDict[bytes, tuple[int, int]] = field(default_factory=OrderedDict)
    by_use: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    bytes: int = 0


class NamespaceBook:
    """Follows the namespaces that it was told to follow."""

    def __init__(self) -> None:
        self._followed: dict[bytes, _Namespace] = {}

    def follow(self, namespace: bytes, found: Iterable[tuple[bytes, int, int]], coldest: Iterable[bytes]) -> None:
        """Begin; `found`: (key, bytes taken up, stored at) of what is here, the longest stored first; `coldest`: keys,
        also of other namespaces, in the order in which they would be evicted.
        """
        mine = self._followed[namespace] = _Namespace()
        for key, size, stored_ms in found:
            mine.by_age[key] = (size, stored_ms)
            mine.bytes += size
        mine.by_use.update((key, None) for key in coldest if key in mine.by_age)
        mine.by_use.update((key, None) for key in reversed(mine.by_age) if key not in mine.by_use)

    def follows(self, namespace: bytes) -> bool:
        return namespace in self._followed

    def only(self, namespaces: set[bytes]) -> None:
        """Follow no others any more."""
        for namespace in self._followed.keys() - namespaces:
            del self._followed[namespace]

    def entered(self, chunks: Sequence[Chunk]) -> None:
        """Chunks are here, parents before children: of these the deepest counts as the least recently used."""
        for chunk in chunks:
            mine = self._followed.get(chunk.namespace)
            if mine is not None and chunk.key not in mine.by_age:
                mine.by_age[chunk.key] = (chunk.shape.slot_bytes, chunk.stored_ms)
                mine.bytes += chunk.shape.slot_bytes
        for chunk in reversed(chunks):
            mine = self._followed.get(chunk.namespace)
            if mine is not None:
                mine.by_use.setdefault(chunk.key, None)

    def used(self, chunk: Chunk) -> None:
        mine = self._followed.get(chunk.namespace)
        if mine is not None and chunk.key in mine.by_use:
            mine.by_use.move_to_end(chunk.key)

    def left(self, chunk: Chunk) -> None:
        mine = self._followed.get(chunk.namespace)
        if mine is not None and chunk.key in mine.by_age:
            mine.bytes -= mine.by_age.pop(chunk.key)[0]
            del mine.by_use[chunk.key]

    def expired(self, namespace: bytes, cutoff_ms: int) -> list[bytes]:
        """Keys of what was stored before `cutoff_ms` (Unix epoch), the last stored first: children before parents."""
        found = []
        for key, (_, stored_ms) in self._followed[namespace].by_age.items():
            if stored_ms >= cutoff_ms:
                break
            found.append(key)
        return found[::-1]

    def excess(self, namespace: bytes, quota_bytes: int) -> list[bytes]:
        """Keys of the least recently used, as many as take up what is over the quota."""
        mine, chosen = self._followed[namespace], list[bytes]()
        left = mine.bytes - quota_bytes
        for key in mine.by_use:
            if left <= 0:
                break
            chosen.append(key)
            left -= mine.by_age[key][0]
        return chosen
