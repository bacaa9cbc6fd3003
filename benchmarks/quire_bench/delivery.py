"""Layerwise delivery through the real services against a bare pyucx stream of contiguous layers of the same size.

From drives it is against the bare device, which reads as many bytes of one file on the same drive.

Both run in the same processes' conditions and in turns: a round of one, a round of the other, so that a drift of the
machine meets both. The bare stream is between this process and one that does nothing else. memcpy is one numpy copy of
a layer, in this process.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from quire.client import AsyncClient, Buffer, Lookup
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import KvLayout
from quire.model.nodes import Role
from quire.transport import OFF, data_plane
from quire_bench.filling import fill, llama_layout
from quire_bench.processor import ProcessorTime
from quire_bench.storage.bare_device import BareDevice, best
from quire_bench.stream_peer import BareStream
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median, spread

_MEMORY_SHARE = 8
_FILE_BYTES = 2 << 30
_DEPTH = 128
_HEARTBEATS_S = 4.0
_COLUMNS_MAX = 3


@dataclass(slots=True)
class _Times:
    """Seconds by round: whole delivery and first layer, of Quire and of the bare stream; memcpy of a layer.

    `first`: from the call of `retrieve`, look-up and lease included; `services_s`: processor time of the services;
    `device`: bytes per second of the bare device by way of I/O; `drive_share`: of the chunks, those read from drives.
    """

    delivery: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    services_s: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    bare_first: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    device: list[dict[str, float]] = field(default_factory=list)
    drive_share: float = 0.0


def run(
    tier: str, transport: str, chunk_sizes: list[int], contexts: list[int], hit: float, layers: int, rounds: int
) -> Report:
    """Raises `InvalidRequest` for a tier or a transport that this version does not have."""
    if transport not in ("ucx", "shm"):
        raise InvalidRequest(f"{transport!r}; there are ucx and shm", field="transport")
    if tier not in ("memory", "drives"):
        raise InvalidRequest(f"{tier!r}; there are memory, drives and object", field="tier")
    name = "bare pyucx stream of contiguous layers, same size, same run"
    if tier == "drives":
        name = "the bare device, same bytes, same run: by io_uring, threads, or fio, whichever is the quickest"
    report = Report("delivery", {"name": name, "unit": "GB/s"})
    for context, chunk_tokens in product(contexts, chunk_sizes):
        layout = llama_layout(layers, chunk_tokens)
        chunks = int(context * hit) // chunk_tokens
        size = f"{chunks} chunks, {layout.payload_bytes(chunks) / 2**30:.2f} GiB"
        with Console().status(f"{context} tokens, G = {chunk_tokens}: {size}"):
            params = {"G": chunk_tokens, "N": chunks, "S KiB": layout.slice_bytes >> 10, "context": context, "hit": hit}
            report.rows.append(_measure_layout(tier, transport, layout, chunks, params, rounds))
    if tier == "drives":
        report.notes.append("from drives: the rate times the share of chunks that were not in memory; that is compared")
    report.tall = len(report.rows) > _COLUMNS_MAX
    report.notes.append("every slice's checksum is verified on the way out; the bare stream verifies nothing")
    report.notes.append("first layer: from the call of `retrieve`, which looks up and leases; GB/s: fetches of a lease")
    report.notes.append("CPU s/GB: of gateway, orchestrator and storage node together, per GB delivered")
    return report


def _measure_layout(
    tier: str, transport: str, layout: KvLayout, chunks: int, params: dict[str, Any], rounds: int
) -> Row:
    payload, slab = layout.payload_bytes(chunks), max(64 << 20, layout.chunk_bytes)
    settings = {"QUIRE_STORAGE_SLAB_BYTES": str(slab), "QUIRE_STORAGE_OBJECT_URL": ""}
    arena, drive = (payload // slab + 3) * slab, (3 * payload // (2 * slab) + 8) * slab
    if tier == "memory":
        settings["QUIRE_STORAGE_DRIVES"] = ""
    else:  # so little memory that next to nothing is still there when it is asked for again
        arena = max(4, payload // slab // _MEMORY_SHARE) * slab
        if payload < 2 * arena:
            raise InvalidRequest(f"{payload >> 20} MiB would stay in memory; take a longer context", field="context")
    with tempfile.TemporaryDirectory() as folder:
        shared_memory = f"{folder}/sockets" if transport == "shm" else OFF
        settings["QUIRE_SHARED_MEMORY"] = shared_memory
        cluster = LocalCluster(Path(folder), arena_bytes=arena, drive_bytes=drive, settings=settings)
        with cluster:
            times = uvloop.run(_rounds(cluster, tier, shared_memory, layout, chunks, rounds))
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
    if tier == "drives":
        bare = [rate / 1e9 for rate in best(times.device)]
        measured |= {"bare spread": spread(bare), "from drives GB/s": median(rates) * times.drive_share}
    compared = measured.get("from drives GB/s", median(rates))
    return Row(params, measured, median(bare), compared / median(bare))


async def _rounds(
    cluster: LocalCluster, tier: str, shared_memory: str, layout: KvLayout, chunks: int, rounds: int
) -> _Times:
    namespace, times = Namespace("bench", "1", layout), _Times()
    keys = block_keys(namespace, list(range(chunks * layout.chunk_tokens)), HashAlgorithm.BLAKE3)
    layer_bytes = chunks * layout.slice_bytes
    async with AsyncExitStack() as stack:
        plane = data_plane(shared_memory)
        client = await stack.enter_async_context(AsyncClient(cluster.gateway_address, transport=plane))
        target = client.allocate(layout.payload_bytes(chunks))
        await fill(client, namespace, keys, Durability.LOCAL if tier == "drives" else Durability.MEMORY)
        device = None
        if tier == "drives":
            device = BareDevice([str(cluster.folder)], min(layout.payload_bytes(chunks), _FILE_BYTES), _DEPTH)
            await device.start()
            stack.push_async_callback(device.close)
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
                if device is not None:
                    times.device.append(await device.rates(layout.payload_bytes(chunks)))
        await client.release(found)
        if device is not None:
            times.drive_share = await _drive_share(client)
    return times


async def _deliver(client: AsyncClient, found: Lookup, target: Buffer) -> float:
    """Seconds until the last layer of what is leased."""
    started = time.perf_counter()
    delivery = await client.fetch(found, target, order=DeliveryOrder.LAYERWISE)
    for layer in range(delivery.num_layers):
        await delivery.layer(layer)
    seconds = time.perf_counter() - started
    await delivery.summary()
    await delivery.quiesced(10)
    return seconds


async def _retrieve(client: AsyncClient, namespace: Namespace, keys: ChunkKeys, target: Buffer) -> float:
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


async def _drive_share(client: AsyncClient) -> float:
    """Of the chunks that were asked for, as far as the storage node's heartbeats have told."""
    await asyncio.sleep(_HEARTBEATS_S)
    (node,) = [node for node in (await client.status()) if node.role is Role.STORAGE]
    hits = [node.stats[f"hits {name}"] for name in ("disk", "memory")]
    return hits[0] / sum(hits)
