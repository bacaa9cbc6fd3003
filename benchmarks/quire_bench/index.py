"""What a chunk costs in the prefix index: bytes of Redis, and microseconds to register and to match it.

The baseline is plain Redis in the same run: hashes of 256 fields, a key of 32 bytes → the node that holds the chunk,
without parents, generations, counts of children and counts by node.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis.asyncio as redis
from rich.progress import Progress

from quire.model.errors import NodeUnavailable
from quire.model.keys import BUCKET_CHUNKS, KEY_BYTES, ChunkKeys
from quire.model.records import ChunkRecords, records
from quire_server.redis import PrefixIndex, connect
from quire_tools.local.embedded_redis import redis_command
from quire_tools.report import Report, Row

_LONGEST: Final = 4096
_ROUNDS: Final = 200
_NODES: Final = 16
_STEP: Final = 8192
_PLAIN: Final = 100_000
_BILLION: Final = 10**9


@dataclass(frozen=True, slots=True)
class Shape:
    """Chains of `shortest` to `longest` chunks.

    The first `common` are the same in all. They are stored by `turns` of that many chunks, 0 for whole. `unchained`:
    each chunk stands for itself.
    """

    shortest: int
    longest: int
    common: int = 0
    turns: int = 0
    unchained: bool = False

    def chains(self, rng: np.random.Generator) -> Iterator[ChunkKeys]:
        """Without an end."""
        trunk = rng.bytes(self.common * KEY_BYTES)
        while True:
            length = int(rng.integers(self.shortest, self.longest + 1))
            yield ChunkKeys(trunk + rng.bytes((length - self.common) * KEY_BYTES))

    def records(self, keys: ChunkKeys, first: int, count: int) -> ChunkRecords:
        return records(keys, first, count, unchained=self.unchained)


SHAPES: Final[dict[str, Shape]] = {
    "chains of 20 to 1,500 chunks": Shape(20, 1500),
    "conversations, a common prompt of 20, in turns of 16": Shape(50, 400, 20, 16),
    "200 chunks behind one root": Shape(200, 200, 1),
    "12 chunks behind one root": Shape(12, 12, 1),
    "unchained, 200 at a time": Shape(200, 200, unchained=True),
}


def run(chunks: int, seed: int = 1, show_progress: bool = True) -> Report:
    """Each shape with so many chunks, in a Redis of its own."""
    report = Report("index", {"name": "a hash of 256 keys → node, same run", "unit": "bytes a chunk"}, tall=True)
    with Progress(transient=True, disable=not show_progress) as progress:
        for name, shape in SHAPES.items():
            task = progress.add_task(name, total=chunks)
            with _redis() as url:
                measured = asyncio.run(
                    _measure(url, shape, chunks, seed, lambda count, task=task: progress.advance(task, count))  # type: ignore[misc]
                )
            report.rows.append(Row({"shape": name}, measured, measured["plain"], measured["plain"] / measured["bytes"]))
    report.notes += [
        f"{chunks} chunks of each shape on {_NODES} nodes; bytes: Redis' used_memory, everything included",
        f"match: the server's time, for the longest match of {_LONGEST} keys that are all indexed, and for own chains",
        "a billion: bytes a chunk times 10^9; what is fixed (counts by node: 256 hashes) is in it",
    ]
    return report


@contextlib.contextmanager
def _redis() -> Iterator[str]:
    """The URL of an empty Redis of its own."""
    with tempfile.TemporaryDirectory(prefix="quire-index-") as folder:
        socket = Path(folder) / "redis.sock"
        command = [*redis_command(Path(folder), str(socket)), "--appendonly", "no"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            for _ in range(1000):
                if socket.exists():
                    break
                time.sleep(0.02)
            else:
                raise NodeUnavailable("Redis does not start")
            yield f"unix://{socket}"
        finally:
            server.kill()
            server.wait()


async def _measure(url: str, shape: Shape, chunks: int, seed: int, step: Callable[[int], None]) -> dict[str, float]:
    client = connect(url, timeout_s=60)
    index, rng = PrefixIndex(client), np.random.default_rng(seed)
    plain = await _plain(client, rng)
    before, spent, kept = await _used(client), 0.0, list[ChunkKeys]()
    listed = reported = 0
    chains = shape.chains(rng)
    while listed < chunks:
        keys, node = next(chains), f"storage-{rng.integers(_NODES)}"
        started = time.perf_counter()
        size = shape.turns or BUCKET_CHUNKS
        for at in range(0, len(keys), size):
            await index.register(node, shape.records(keys, at, min(size, len(keys) - at)), 0)
        spent += time.perf_counter() - started
        listed += len(keys) - (shape.common if kept else 0)
        if len(kept) < _ROUNDS:
            kept.append(keys)
        if listed - reported >= _STEP:
            step(listed - reported)
            reported = listed
    count = sum(each.count for each in (await index.listings()).values())
    used = (await _used(client) - before) / count
    measured = {
        "bytes": used,
        "plain": plain,
        "GB a billion": used * _BILLION / 1e9,
        "register, µs a chunk": spent / listed * 1e6,
        "match of its own, µs": await _server_us(client, index, kept),
        "match of 4,096, µs": await _server_us(client, index, [await _long(index, rng)] * _ROUNDS),
    }
    started = time.perf_counter()
    evictions = [await index.evict(shape.records(keys, 0, len(keys))[::-1], 0, 0) for keys in kept]
    measured["evict, µs a chunk"] = (time.perf_counter() - started) / sum(map(len, kept)) * 1e6
    assert evictions[-1].removed, "nothing extends its last chunk"
    await client.aclose()
    return measured


async def _plain(client: redis.Redis, rng: np.random.Generator) -> float:
    """Bytes a chunk, as anybody would write it."""
    before = await _used(client)
    for bucket in range(_PLAIN // BUCKET_CHUNKS):
        keys = ChunkKeys(rng.bytes(BUCKET_CHUNKS * KEY_BYTES))
        fields: dict[Any, Any] = {key: f"storage-{rng.integers(_NODES)}" for key in keys}
        await client.hset(f"plain:{bucket}", mapping=fields)
    used = await _used(client) - before
    await client.flushall()
    return used / (_PLAIN // BUCKET_CHUNKS * BUCKET_CHUNKS)


async def _long(index: PrefixIndex, rng: np.random.Generator) -> ChunkKeys:
    keys = ChunkKeys(rng.bytes(_LONGEST * KEY_BYTES))
    await index.register("storage-0", records(keys, 0, len(keys)), 0)
    return keys


async def _server_us(client: redis.Redis, index: PrefixIndex, chains: list[ChunkKeys]) -> float:
    """Mean microseconds of Redis' own time."""
    await client.config_resetstat()
    for keys in chains:
        await index.match(keys)
    stats = await client.info("commandstats")
    return float(stats["cmdstat_evalsha"]["usec_per_call"])


async def _used(client: redis.Redis) -> int:
    return int((await client.info("memory"))["used_memory"])
