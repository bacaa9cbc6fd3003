"""Keys of the chunks on this node by fingerprint, which is how the index names them. Built in steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.fingerprints import fingerprint, fingerprints
from quire.model.index import Held
from quire.model.keys import KEY_BYTES

_PAGE: Final = 256
Keys = npt.NDArray[np.uint8]
Prints = npt.NDArray[np.uint64]


class LocalFingerprints:
    """`keys`: uint8 (n, 32), sorted by their fingerprints `prints`, uint64 (n,).

    `arriving`: a set that grows as keys arrive.
    """

    def __init__(self, keys: Keys, prints: Prints, arriving: set[bytes]) -> None:
        self._keys = keys
        self._prints = prints
        self._marked = np.zeros(len(prints), dtype=np.bool_)
        self._arriving = arriving
        self._arrived: dict[bytes, bytes] = {}
        self._looked = set[bytes]()

    @classmethod
    async def look(cls, scan: Iterator[list[bytes]], arriving: set[bytes], threads: Executor) -> LocalFingerprints:
        """Collect all keys of `scan`. `arriving`: keys that have arrived since before the scan began."""
        keys, prints = [np.empty((0, KEY_BYTES), np.uint8)], [np.empty(0, np.uint64)]
        for part in scan:
            packed = b"".join(part)
            keys.append(np.frombuffer(packed, dtype=np.uint8).reshape(-1, KEY_BYTES))
            prints.append(_numbers(fingerprints(packed)))
            await asyncio.sleep(0)
        return cls(*await asyncio.get_running_loop().run_in_executor(threads, _in_order, keys, prints), arriving)

    def keys(self, page: Sequence[Held]) -> list[bytes | None]:
        """The key of each; None for a chunk that is not here."""
        if len(self._arriving) != len(self._looked):
            new = self._arriving - self._looked
            self._looked |= new
            self._arrived.update((fingerprint(key), key) for key in new)
        prints = _numbers(b"".join(holding.fingerprint for holding in page))
        places = np.searchsorted(self._prints, prints)
        in_range = places < len(self._prints)
        in_range[in_range] = self._prints[places[in_range]] == prints[in_range]
        return [
            self._keys[place].tobytes() if is_candidate else self._arrived.get(holding.fingerprint)
            for place, is_candidate, holding in zip(places.tolist(), in_range.tolist(), page, strict=True)
        ]

    def unknown(self, page: Sequence[Held]) -> list[Held]:
        """Return the holdings that are not here."""
        return [holding for holding, key in zip(page, self.keys(page), strict=True) if key is None]

    def mark(self, keys: Sequence[bytes]) -> None:
        """The index lists these."""
        prints = _numbers(fingerprints(b"".join(keys)))
        places = np.searchsorted(self._prints, prints)
        inside = places < len(self._prints)
        places, prints = places[inside], prints[inside]
        self._marked[places[self._prints[places] == prints]] = True

    def unmarked(self) -> Iterator[list[bytes]]:
        """Keys of the scan that the index does not list, in steps."""
        for first in range(0, len(self._keys), _PAGE):
            page = slice(first, first + _PAGE)
            packed = self._keys[page][~self._marked[page]].tobytes()
            yield [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def _in_order(keys: Sequence[Keys], prints: Sequence[Prints]) -> tuple[Keys, Prints]:
    """Runs in a thread; numpy releases the GIL for most of it. Duplicate keys are merged."""
    numbers, first = np.unique(np.concatenate(prints), return_index=True)
    return np.concatenate(keys)[first], numbers


def _numbers(prints: bytes) -> Prints:
    return np.frombuffer(prints, dtype=">u8").astype(np.uint64)
