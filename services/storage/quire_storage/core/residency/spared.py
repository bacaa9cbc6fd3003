"""Copies that are not chosen for eviction for a time, although they are the oldest that nothing here extends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire_storage.core.residency.entry import Entry

_END_S: Final = 5.0
_REFUSED_S: Final = 10.0
_EACH_S: Final = 0.01
"""For each copy that is refused already: of many, no more are asked for again than a hundred a second."""
_ENDED_MAX: Final = 4096
"""Keys of either kind that are given out at once, within one step of the event loop."""


class Spared:
    """Keys of copies that only the index, and other nodes, know to be extended.

    The end of a range that was just registered: the next range of the store is on another node, which registers it
    as soon as it finds its parent. And copies that the index has refused to evict: chunks on other nodes extend them,
    or a lease pins them.
    """

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}
        self._refused: dict[bytes, float] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._ends or key in self._refused

    def registered(self, entries: Sequence[Entry], now_s: float) -> None:
        """Spare the ends of the chains of a store. Chunks that stand for themselves are not extended."""
        parents = {entry.chunk.record.parent for entry in entries}
        if len(entries) == 1 or parents != {b""}:
            for entry in entries:
                if entry.key not in parents:
                    _renew(self._ends, entry.key, now_s + _END_S)

    def refused(self, key: bytes, now_s: float) -> None:
        """Spare a copy that the index keeps."""
        _renew(self._refused, key, now_s + max(_REFUSED_S, _EACH_S * len(self._refused)))

    def forget(self, key: bytes) -> None:
        """The copy has left."""
        self._ends.pop(key, None)
        self._refused.pop(key, None)

    def end(self, now_s: float = float("inf")) -> list[bytes]:
        """Return keys that are spared no longer, the youngest first; without a time: the oldest of all."""
        return _ended(self._ends, now_s) + _ended(self._refused, now_s)


def _renew(times: dict[bytes, float], key: bytes, until_s: float) -> None:
    times.pop(key, None)
    times[key] = until_s


def _ended(times: dict[bytes, float], now_s: float) -> list[bytes]:
    """Take out the keys whose time is over; later ones come first."""
    ended = list[bytes]()
    for key, until_s in times.items():
        if until_s > now_s or len(ended) == _ENDED_MAX:
            break
        ended.append(key)
    for key in ended:
        del times[key]
    return ended[::-1]
