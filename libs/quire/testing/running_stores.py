"""The running stores in memory: what `quire_server.redis.RunningStores` does in Redis, by the same contract suite."""

from __future__ import annotations

from collections.abc import Sequence

from quire.model.keys import ChunkKeys
from quire.model.ranges import ChunkRange


class MemoryRunningStores:
    """Methods are those of `RunningStores`."""

    def __init__(self) -> None:
        self._stores: dict[bytes, tuple[bytes, int, str, tuple[bytes, ...]]] = {}

    async def begin(self, keys: ChunkKeys, ranges: Sequence[ChunkRange], store_id: bytes, until_ms: int) -> None:
        for run in ranges:
            stored = tuple(keys.run(run.first, run.count))
            self._stores[stored[0]] = (store_id, until_ms, run.node_id, stored)

    async def end(self, keys: ChunkKeys, ranges: Sequence[ChunkRange], store_id: bytes) -> None:
        for run in ranges:
            if self._stores.get(keys.at(run.first), (b"",))[0] == store_id:
                del self._stores[keys.at(run.first)]

    async def find(self, keys: ChunkKeys, now_ms: int) -> list[ChunkRange]:
        ranges = list[tuple[int, ChunkRange]]()
        for at in range(len(keys)):
            _, until_ms, node, stored = self._stores.get(keys.at(at), (b"", 0, "", ()))
            if until_ms > now_ms:
                prefix = list(keys.run(at, len(keys) - at))
                count = next((i for i, (a, b) in enumerate(zip(prefix, stored, strict=False)) if a != b), None)
                shared = min(len(prefix), len(stored)) if count is None else count
                ranges.append((until_ms, ChunkRange(node, at, shared)))
        return [run for _, run in sorted(ranges, key=lambda entry: -entry[0])]
