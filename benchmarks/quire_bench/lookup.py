"""Longest match of a long context, as a client has it: over its session, with a lease, warm and after idleness.

The baseline is a look-up of no key at all in the same run: the same round trip without an index behind it. Chunks are
tiny (their size does not matter to the index), the keys and their number are real. Drives and object tier are off: what
was stored is not still being written.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import uvloop
from rich.console import Console

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_bench.processor import ProcessorTime
from quire_server.redis import AccessKeys, connect
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median, percentile, spread

_HIT = 0.87
"""Part of the keys that matches: it ends within an index bucket."""
_SLOT_BYTES = 8192
"""More than a chunk takes up in the arena."""
_SATURATION_S = 3.0
_IDLE_S = 0.05
_IDLE_ROUNDS = 40
_FIRST_ROUNDS = 20
_LEASE_MS = 10_000
_RANKS = 8


def run(context: int, chunk_tokens: int, rounds: int, clients: int) -> Report:
    """`context` tokens in chunks of `chunk_tokens`, 87.5% of them cached; `clients` look up at once for saturation.

    In a cluster without tokens, then as a tenant of one with tokens, whose keys the gateway derives.
    """
    rows, arena_bytes = [], max(128 << 20, context // chunk_tokens * _SLOT_BYTES)
    for auth in ("off", "tokens"):
        with tempfile.TemporaryDirectory() as folder, Console().status("starting a cluster"):
            settings = {"QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": "", "QUIRE_GATEWAY_AUTH": auth}
            with LocalCluster(Path(folder), arena_bytes=arena_bytes, settings=settings) as cluster:
                rows.append(uvloop.run(_measure(cluster, auth, context, chunk_tokens, rounds, clients)))
    namespace, tokens = _namespace(chunk_tokens), list(range(context))
    hashing = {algorithm: _timed_hash(namespace, tokens, algorithm) for algorithm in HashAlgorithm}
    hashed = ", ".join(f"{name.value} {ms:.1f} ms" for name, ms in hashing.items())
    notes = [f"hashing {context} tokens apart: {hashed}"]
    notes.append(f"{clients} look-ups at once for saturation; the client shares the machine")
    return Report("lookup", {"name": "a look-up of no key: the same round trip", "unit": "ms"}, rows, notes)


def _namespace(chunk_tokens: int, salt: bytes = b"") -> Namespace:
    return Namespace("bench", "1", KvLayout(1, chunk_tokens, 1, 8, Dtype.FP16), salt)


async def _tenant(cluster: LocalCluster) -> tuple[str, bytes]:
    """A token that may name memory, and the salt of its tenant."""
    redis = connect(cluster.redis_url)
    keys = AccessKeys(redis, cluster.secret.encode())
    key = await keys.create("bench", rdma=True)
    await redis.aclose()
    return f"{key.name}:{keys.secret(key)}", keys.salt("bench")


async def _measure(cluster: LocalCluster, auth: str, context: int, chunk_tokens: int, rounds: int, clients: int) -> Row:
    token, salt = await _tenant(cluster) if auth == "tokens" else ("", b"")
    namespace = _namespace(chunk_tokens, salt)
    keys = block_keys(namespace, list(range(context)))
    present = keys.run(0, int(len(keys) * _HIT))
    async with AsyncClient(cluster.gateway_address, token=token) as client:
        buffer = client.allocate(namespace.layout.payload_bytes(len(present)))
        session = await client.store(namespace, present, 0, buffer, durability=Durability.MEMORY)
        session.layer_ready(0)
        await session.commit()
        await _lookups(client, namespace, keys, 30)
        processor = ProcessorTime(cluster)
        seconds, index_us = await _lookups(client, namespace, keys, rounds)
        used = processor.read()
        idle, _ = await _lookups(client, namespace, keys, _IDLE_ROUNDS, pause_s=_IDLE_S)
        empty, _ = await _lookups(client, namespace, ChunkKeys(b""), rounds)
        first = [await _first(cluster, token, namespace, keys) for _ in range(_FIRST_ROUNDS)]
        found = await client.lookup(namespace, keys, lease_ttl_ms=0)
        assert found.matched_chunks == len(present), "the index lost chunks"
        shards_s, single_s = await _ranks(client, keys, salt, chunk_tokens, rounds)
        processor.read()
        rate = await _saturate(client, namespace, keys, clients)
        busy = processor.read()
    measured = {
        "median ms": median(seconds) * 1e3,
        "p99 ms": percentile(seconds, 0.99) * 1e3,
        "spread": spread(seconds),
        "after 50 ms idle, median ms": median(idle) * 1e3,
        "a client's first, median ms": median(first) * 1e3,
        "index median ms": median(index_us) / 1e3,
        f"{_RANKS} ranks, median ms": median(shards_s) * 1e3,
        f"{_RANKS} ranks one by one, median ms": median(single_s) * 1e3,
        "lookups/s": rate,
        "CPU us, client": used["client"] / rounds * 1e6,
        "CPU us, gateway": used["gateway"] / rounds * 1e6,
        "CPU us, Redis": used["redis"] / rounds * 1e6,
        "saturated: CPU us, all": sum(busy.values()) / (rate * _SATURATION_S) * 1e6,
    }
    ratio = median(empty) / median(seconds)
    params = {"auth": auth, "keys": len(keys), "matched": len(present)}
    return Row(params, measured, median(empty) * 1e3, ratio)


async def _first(cluster: LocalCluster, token: str, namespace: Namespace, keys: ChunkKeys) -> float:
    """Seconds of the first look-up of a client, which cannot know where the prefix ends."""
    async with AsyncClient(cluster.gateway_address, token=token) as client:
        await client.lookup(namespace, ChunkKeys(b""), lease_ttl_ms=0)  # its session is open then
        seconds, _ = await _lookups(client, namespace, keys, 1)
        return seconds[0]


async def _lookups(
    client: AsyncClient, namespace: Namespace, keys: ChunkKeys, rounds: int, *, pause_s: float = 0.0
) -> tuple[list[float], list[float]]:
    seconds, index_us = [], []
    for _ in range(rounds):
        if pause_s:
            await asyncio.sleep(pause_s)
        started = time.perf_counter()
        found = await client.lookup(namespace, keys, lease_ttl_ms=_LEASE_MS)
        seconds.append(time.perf_counter() - started)
        index_us.append(float(found.index_us))
    return seconds, index_us


async def _ranks(
    client: AsyncClient, keys: ChunkKeys, salt: bytes, chunk_tokens: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of a look-up for all ranks of an engine, of which one keeps its blocks: together, and concurrently."""
    shards = [(_namespace(chunk_tokens, salt), keys)]
    for rank in range(1, _RANKS):
        namespace = replace(_namespace(chunk_tokens, salt), shard_index=rank, shard_count=_RANKS)
        shards.append((namespace, block_keys(namespace, list(range(len(keys) * chunk_tokens)))))
    together, apart = list[float](), list[float]()
    for _ in range(max(1, rounds // _RANKS)):
        started = time.perf_counter()
        await client.lookup_shards(shards, lease_ttl_ms=_LEASE_MS)
        middle = time.perf_counter()
        await asyncio.gather(*(client.lookup(*shard, lease_ttl_ms=_LEASE_MS) for shard in shards))
        together.append(middle - started)
        apart.append(time.perf_counter() - middle)
    return together, apart


async def _saturate(client: AsyncClient, namespace: Namespace, keys: ChunkKeys, clients: int) -> float:
    """Look-ups per second with `clients` of them under way at any time."""
    end = time.perf_counter() + _SATURATION_S

    async def one() -> int:
        count = 0
        while time.perf_counter() < end:
            await client.lookup(namespace, keys, lease_ttl_ms=_LEASE_MS)
            count += 1
        return count

    return sum(await asyncio.gather(*(one() for _ in range(clients)))) / _SATURATION_S


def _timed_hash(namespace: Namespace, tokens: list[int], algorithm: HashAlgorithm) -> float:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        block_keys(namespace, tokens, algorithm)
        seconds.append(time.perf_counter() - started)
    return median(seconds) * 1e3
