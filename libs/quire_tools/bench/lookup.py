"""Longest match of a long context through gRPC: client → gateway → orchestrator → Redis and back, warm.

The baseline is a look-up of no key at all in the same run: the same two gRPC hops without an index behind them. Chunks
are tiny (their size does not matter to the index), the keys and their number are real.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import uvloop
from rich.console import Console

from quire.client import QuireClient
from quire.model.durability import Durability
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_tools.bench.report import Report, Row, median, percentile, spread
from quire_tools.local import LocalCluster

_HIT = 0.875
_SATURATION_S = 3.0


def run(context: int, chunk_tokens: int, rounds: int, clients: int) -> Report:
    """`context` tokens in chunks of `chunk_tokens`, 87.5% of them cached; `clients` look up at once for saturation."""
    with tempfile.TemporaryDirectory() as folder, Console().status("starting a cluster"):
        cluster = LocalCluster(Path(folder), arena_bytes=128 << 20)
        with cluster:
            measured: Report = uvloop.run(_measure(cluster.gateway_address, context, chunk_tokens, rounds, clients))
            return measured


async def _measure(gateway: str, context: int, chunk_tokens: int, rounds: int, clients: int) -> Report:
    namespace = Namespace("bench", "1", KvLayout(1, chunk_tokens, 1, 8, Dtype.FP16))
    tokens = list(range(context))
    hashing = {algorithm: _timed_hash(namespace, tokens, algorithm) for algorithm in HashAlgorithm}
    keys = block_keys(namespace, tokens)
    present = keys.run(0, int(len(keys) * _HIT))
    async with QuireClient(gateway) as client:
        buffer = client.allocate(namespace.layout.payload_bytes(len(present)))
        session = await client.store(namespace, present, 0, buffer, durability=Durability.MEMORY)
        session.layer_produced(0)
        await session.finish()
        await _lookups(client, namespace, keys, 30)
        seconds, index_us = await _lookups(client, namespace, keys, rounds)
        empty, _ = await _lookups(client, namespace, ChunkKeys(b""), rounds)
        found = await client.lookup(namespace, keys, lease_ttl_ms=0)
        assert found.matched_chunks == len(present), "the index lost chunks"
        rate = await _saturate(client, namespace, keys, clients)
    measured = {
        "median ms": median(seconds) * 1e3,
        "p99 ms": percentile(seconds, 0.99) * 1e3,
        "spread": spread(seconds),
        "index median ms": median(index_us) / 1e3,
        "lookups/s": rate,
    }
    ratio = median(empty) / median(seconds)
    row = Row({"keys": len(keys), "matched": len(present)}, measured, median(empty) * 1e3, ratio)
    hashed = ", ".join(f"{name.value} {ms:.1f} ms" for name, ms in hashing.items())
    notes = [f"hashing {context} tokens apart: {hashed}"]
    return Report("lookup", {"name": "a look-up of no key: the same two gRPC hops", "unit": "ms"}, [row], notes)


async def _lookups(
    client: QuireClient, namespace: Namespace, keys: ChunkKeys, rounds: int
) -> tuple[list[float], list[float]]:
    seconds, index_us = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        found = await client.lookup(namespace, keys, lease_ttl_ms=0)
        seconds.append(time.perf_counter() - started)
        index_us.append(float(found.index_us))
    return seconds, index_us


async def _saturate(client: QuireClient, namespace: Namespace, keys: ChunkKeys, clients: int) -> float:
    """Look-ups per second with `clients` of them under way at any time."""
    end = time.perf_counter() + _SATURATION_S

    async def one() -> int:
        count = 0
        while time.perf_counter() < end:
            await client.lookup(namespace, keys, lease_ttl_ms=0)
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
