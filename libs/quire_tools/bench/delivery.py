"""Layerwise delivery through the real services against a bare pyucx stream of contiguous layers of the same size.

Both run in the same processes' conditions and in turns: a round of one, a round of the other, so that a drift of the
machine meets both. The bare stream is between this process and one that does nothing else. memcpy is one numpy copy of
a layer, in this process.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console

from quire.client import Buffer, Lookup, QuireClient
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.transport import OFF, data_plane
from quire_tools.bench.processor import ProcessorTime
from quire_tools.bench.report import Report, Row, median, spread
from quire_tools.bench.stream_peer import BareStream
from quire_tools.local import LocalCluster

_LLAMA_KV_HEADS, _LLAMA_HEAD_DIM = 8, 128
_STORE_CHUNKS = 64
_COLUMNS_MAX = 3


@dataclass(slots=True)
class _Times:
    """Seconds by round: whole delivery and first layer, of Quire and of the bare stream; memcpy of a layer.

    `first`: from the call of `retrieve`, look-up and lease included; `services_s`: processor time of the services.
    """

    delivery: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    services_s: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    bare_first: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)


def run(
    tier: str, transport: str, chunk_sizes: list[int], contexts: list[int], hit: float, layers: int, rounds: int
) -> Report:
    """Raises `InvalidRequest` for a tier or a transport that this version does not have."""
    if transport not in ("ucx", "shm"):
        raise InvalidRequest(f"{transport!r}; there are ucx and shm", field="transport")
    if tier != "memory":
        raise InvalidRequest(f"{tier!r}; this version measures the memory tier", field="tier")
    report = Report("delivery", {"name": "bare pyucx stream of contiguous layers, same size, same run", "unit": "GB/s"})
    for context, chunk_tokens in product(contexts, chunk_sizes):
        layout = KvLayout(layers, chunk_tokens, _LLAMA_KV_HEADS, _LLAMA_HEAD_DIM, Dtype.BF16)
        chunks = int(context * hit) // chunk_tokens
        size = f"{chunks} chunks, {layout.payload_bytes(chunks) / 2**30:.2f} GiB"
        with Console().status(f"{context} tokens, G = {chunk_tokens}: {size}"):
            report.rows.append(_measure_layout(layout, transport, chunks, context, hit, rounds))
    report.tall = len(report.rows) > _COLUMNS_MAX
    report.notes.append("every slice's checksum is verified on the way out; the bare stream verifies nothing")
    report.notes.append("first layer: from the call of `retrieve`, which looks up and leases; GB/s: fetches of a lease")
    report.notes.append("CPU s/GB: of gateway, orchestrator and storage node together, per GB delivered")
    return report


def _measure_layout(layout: KvLayout, transport: str, chunks: int, context: int, hit: float, rounds: int) -> Row:
    payload = layout.payload_bytes(chunks)
    slab = max(64 << 20, layout.chunk_bytes)
    arena = (payload // slab + 3) * slab
    settings = {"QUIRE_STORAGE_SLAB_BYTES": str(slab), "QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": ""}
    with tempfile.TemporaryDirectory() as folder:
        shared_memory = f"{folder}/sockets" if transport == "shm" else OFF
        settings["QUIRE_SHARED_MEMORY"] = shared_memory
        cluster = LocalCluster(Path(folder), arena_bytes=arena, settings=settings)
        with cluster:
            times = uvloop.run(_rounds(cluster, shared_memory, layout, chunks, rounds))
    rates = [payload / seconds / 1e9 for seconds in times.delivery]
    bare = [payload / seconds / 1e9 for seconds in times.bare]
    measured = {
        "GB/s": median(rates),
        "spread": spread(rates),
        "first layer ms": median(times.first) * 1e3,
        "first layer spread": spread(times.first),
        "bare first layer ms": median(times.bare_first) * 1e3,
        "first layer / bare": median(times.first) / median(times.bare_first),
        "bare spread": spread(bare),
        "memcpy GB/s": payload / layout.num_layers / median(times.memcpy) / 1e9,
        "CPU s/GB": sum(times.services_s) / (2 * payload * len(times.services_s)) * 1e9,
    }
    if transport == "shm":
        measured["/ memcpy"] = measured["GB/s"] / measured["memcpy GB/s"]
    params = {"G": layout.chunk_tokens, "N": chunks, "S KiB": layout.slice_bytes >> 10, "context": context, "hit": hit}
    return Row(params, measured, median(bare), median(rates) / median(bare))


async def _rounds(cluster: LocalCluster, shared_memory: str, layout: KvLayout, chunks: int, rounds: int) -> _Times:
    namespace, times = Namespace("bench", "1", layout), _Times()
    keys = block_keys(namespace, list(range(chunks * layout.chunk_tokens)), HashAlgorithm.BLAKE3)
    layer_bytes = chunks * layout.slice_bytes
    async with AsyncExitStack() as stack:
        plane = data_plane(shared_memory)
        client = await stack.enter_async_context(QuireClient(cluster.gateway_address, transport=plane))
        target = client.allocate(layout.payload_bytes(chunks))
        await _fill(client, namespace, keys)
        bare = await stack.enter_async_context(BareStream(layer_bytes, layout.num_layers, target))
        found = await client.lookup(namespace, keys, lease_ttl_ms=300_000)
        assert found.matched_chunks == chunks, "the store lost chunks"
        copy = np.empty(layer_bytes, dtype=np.uint8)
        for round_number in range(rounds + 2):
            processor = ProcessorTime(cluster)
            whole = await _deliver(client, found, target)
            first = await _retrieve(client, namespace, keys, target)
            used = processor.read()
            plain = await bare.round()
            started = time.perf_counter()
            assert target.view is not None
            np.copyto(copy, target.view[:layer_bytes])
            if round_number >= 2:
                times.memcpy.append(time.perf_counter() - started)
                times.delivery.append(whole)
                times.first.append(first)
                times.services_s.append(used["gateway"] + used["orchestrator"] + used["storage"])
                times.bare.append(plain[0])
                times.bare_first.append(plain[1])
        await client.release(found)
    return times


async def _deliver(client: QuireClient, found: Lookup, target: Buffer) -> float:
    """Seconds until the last layer of what is leased."""
    started = time.perf_counter()
    delivery = await client.fetch(found, target, order=DeliveryOrder.LAYERWISE)
    for layer in range(delivery.num_layers):
        await delivery.layer(layer)
    seconds = time.perf_counter() - started
    await delivery.summary()
    await delivery.quiesced(10)
    return seconds


async def _retrieve(client: QuireClient, namespace: Namespace, keys: ChunkKeys, target: Buffer) -> float:
    """Seconds until the first layer of what is yet to be looked up."""
    started = time.perf_counter()
    retrieval = await client.retrieve(namespace, keys, target, order=DeliveryOrder.LAYERWISE)
    assert retrieval.delivery is not None, "the store lost chunks"
    await retrieval.delivery.layer(0)
    seconds = time.perf_counter() - started
    await retrieval.delivery.summary()
    await retrieval.delivery.quiesced(10)
    await client.release(retrieval.found)
    return seconds


async def _fill(client: QuireClient, namespace: Namespace, keys: ChunkKeys) -> None:
    """Store random chunks, some at a time."""
    chunks = len(keys)
    layout, step = namespace.layout, max(1, min(_STORE_CHUNKS, (256 << 20) // namespace.layout.chunk_bytes))
    buffer = client.allocate(layout.payload_bytes(step))
    assert buffer.view is not None
    buffer.view[:] = np.random.default_rng(3).integers(0, 256, buffer.length, dtype=np.uint8)
    for first in range(0, chunks, step):
        upto = keys.run(0, min(chunks, first + step))
        session = await client.store(namespace, upto, first, buffer, durability=Durability.MEMORY)
        for layer in range(layout.num_layers):
            session.layer_produced(layer)
        await session.finish()
    buffer.close()
