"""Range reads of objects by obstore, without anything of Quire: what benchmarks of the object tier compare with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import obstore
from obstore.store import S3Store

from quire.model.chunk_object import object_of_path
from quire.model.keys import ChunkKeys
from quire_server.objects import open_store

_AT_ONCE: Final = (4, 8, 16, 32, 64)
_WHOLE_AT_ONCE: Final = 8
_TIMEOUT_S: Final = 60.0
Plan = Sequence[tuple[int, int]]
"""Runs of layers, each read by one range."""


def open_bare(place: str, endpoint: str) -> Any:
    """Open a place of the object tier. `endpoint`: of an S3 server; empty for the one that is configured."""
    if place.startswith("s3://") and endpoint:
        return S3Store.from_url(place, endpoint=endpoint, client_options={"allow_http": True})
    return open_store(place, _TIMEOUT_S, "--object-url")


def paths_of(store: Any, keys: ChunkKeys) -> list[str]:
    """Return the paths of the chunks' objects."""
    chunks = set(keys)
    paths = (str(entry["path"]) for page in obstore.list(store, prefix="chunks/") for entry in page)
    matches = [path for path in paths if (name := object_of_path(path)) is not None and name[0] in chunks]
    assert len(matches) == len(keys), "each chunk has an object"
    return matches


class BareReads:
    """Reads of layer-major objects: layer l is bytes [l, l + 1) · `layer_bytes`."""

    def __init__(self, store: Any, paths: Sequence[str], layers: int, layer_bytes: int) -> None:
        self._store = store
        self._paths = paths
        self._layers, self._layer_bytes = layers, layer_bytes
        growing, start, size = [(0, 1)], 1, 1
        while start < layers:
            growing.append((start, min(layers, start + size)))
            start, size = start + size, 2 * size
        self._plans: tuple[Plan, ...] = (growing, [(0, layers)])
        self._fastest: dict[str, tuple[Plan, int]] = {}

    async def first(self) -> float:
        """Seconds for the first layer of all objects."""
        return await self._by_the_fastest("first", [[(0, 1)]])

    async def all(self) -> float:
        """Seconds for all layers."""
        return await self._by_the_fastest("all", self._plans)

    async def objects(self) -> float:
        """Seconds for whole objects, eight at a time."""
        return await self._read([(0, self._layers)], _WHOLE_AT_ONCE)

    async def _by_the_fastest(self, name: str, plans: Iterable[Plan]) -> float:
        """Read in the way that was the fastest, which is tried out once."""
        if name not in self._fastest:
            trials = [(await self._read(plan, count), plan, count) for plan in plans for count in _AT_ONCE]
            self._fastest[name] = min(trials)[1:]
        return await self._read(*self._fastest[name])

    async def _read(self, plan: Plan, at_once: int) -> float:
        room, size = asyncio.Semaphore(at_once), self._layer_bytes

        async def one(path: str, start: int, stop: int) -> None:
            async with room:
                await obstore.get_range_async(self._store, path, start=start * size, end=stop * size)

        started = time.perf_counter()
        await asyncio.gather(*(one(path, *run) for run in plan for path in self._paths))
        return time.perf_counter() - started
