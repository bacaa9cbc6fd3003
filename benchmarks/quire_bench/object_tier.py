"""Cold deliveries from the object tier against bare obstore reads of the same bytes.

Before each delivery the node gives up its copies, so that the chunks are in the object tier alone. The bare reads fetch
the same bytes by whichever is fastest: one range for each object, or a growing number of layers at a time; five
concurrencies. They verify and deliver nothing.
"Whole objects" is the way of releases before 0.3: each object as a whole, eight at a time, and the first layer once all
are there.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from quire.client import AsyncClient, Buffer
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import KvLayout
from quire_bench.bare_reads import BareReads, open_bare, paths_of
from quire_bench.cold_cluster import ColdCluster, cold_cluster, endpoint_of
from quire_bench.filling import fill, llama_layout
from quire_bench.slow_link import SlowLink
from quire_tools.report import Report, Row, median, spread


@dataclass(slots=True)
class _Times:
    """Seconds by round."""

    first: list[float] = field(default_factory=list)
    delivery: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    bare_first: list[float] = field(default_factory=list)
    objects: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)


def run(
    url: str, chunk_sizes: list[int], contexts: list[int], hit: float, layers: int, rounds: int, latency_ms: list[int]
) -> Report:
    """Measure each context, chunk size and latency.

    Raises:
        InvalidRequest: A latency is asked for, and there is no endpoint to delay.
    """
    endpoint = endpoint_of(url, is_delayed=any(latency_ms))
    report = Report(
        "delivery",
        {"name": "bare obstore range reads of the same bytes, same run, best ranges and concurrency", "unit": "GB/s"},
    )
    for context, chunk_tokens, delay_ms in product(contexts, chunk_sizes, latency_ms):
        layout = llama_layout(layers, chunk_tokens)
        chunks = int(context * hit) // chunk_tokens
        with Console().status(f"{context} tokens, G = {chunk_tokens}, {delay_ms} ms: {chunks} cold chunks"):
            params = {"G": chunk_tokens, "N": chunks, "S KiB": layout.slice_bytes >> 10, "latency ms": delay_ms}
            report.rows.append(_measure(url, endpoint, delay_ms, layout, chunks, params, rounds))
    report.notes.append(f"object tier: {url or 'a folder of this machine'}; every delivery is cold")
    report.notes.append("whole objects: obstore reads them 8 at a time; nothing is delivered before the last is there")
    report.tall = True
    return report


def _measure(
    url: str, endpoint: str, delay_ms: int, layout: KvLayout, chunks: int, params: dict[str, Any], rounds: int
) -> Row:
    payload = layout.payload_bytes(chunks)
    with cold_cluster(url, SlowLink(endpoint, delay_ms / 1e3), payload, layout.chunk_bytes) as cold:
        times = uvloop.run(_rounds(cold, layout, chunks, rounds))
    rate, bare = (payload / median(seconds) / 1e9 for seconds in (times.delivery, times.bare))
    measured = {
        "GB/s": rate,
        "spread": spread(times.delivery),
        "first layer ms": median(times.first) * 1e3,
        "bare first layer ms": median(times.bare_first) * 1e3,
        "first / bare": median(times.first) / median(times.bare_first),
        "whole objects ms": median(times.objects) * 1e3,
        "first / whole objects": median(times.first) / median(times.objects),
        "memcpy GB/s": payload / layout.num_layers / median(times.memcpy) / 1e9,
    }
    return Row(params, measured, bare, rate / bare)


async def _rounds(cold: ColdCluster, layout: KvLayout, chunks: int, rounds: int) -> _Times:
    namespace, times = Namespace("bench", "1", layout), _Times()
    keys = block_keys(namespace, list(range(chunks * layout.chunk_tokens)), HashAlgorithm.BLAKE3)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(cold.cluster.gateway_address))
        target = client.allocate(layout.payload_bytes(chunks))
        await fill(client, namespace, keys, Durability.OBJECT)
        store = open_bare(cold.place, cold.endpoint)
        bare = BareReads(store, paths_of(store, keys), layout.num_layers, layout.slice_bytes)
        assert target.view is not None
        copy = np.empty(chunks * layout.slice_bytes, dtype=np.uint8)
        for round_number in range(rounds + 1):
            assert await client.demote(namespace, keys) == chunks, "the object tier has them all"
            first, delivery = await deliver_cold(client, namespace, keys, target)
            bare_first, bare_whole, objects = await bare.first(), await bare.all(), await bare.objects()
            began = time.perf_counter()
            np.copyto(copy, target.view[: len(copy)])
            if round_number:
                times.memcpy.append(time.perf_counter() - began)
                times.first.append(first)
                times.delivery.append(delivery)
                times.bare_first.append(bare_first)
                times.bare.append(bare_whole)
                times.objects.append(objects)
    return times


async def deliver_cold(
    client: AsyncClient, namespace: Namespace, keys: ChunkKeys, target: Buffer
) -> tuple[float, float]:
    """Seconds until the first layer and until the last, look-up included."""
    started = time.perf_counter()
    retrieval = await client.retrieve(namespace, keys, target, order=DeliveryOrder.LAYERWISE)
    assert retrieval.delivery is not None, "the object tier lost chunks"
    await retrieval.delivery.layer(0)
    first = time.perf_counter() - started
    for layer in range(1, retrieval.delivery.num_layers):
        await retrieval.delivery.layer(layer)
    last = time.perf_counter() - started
    await retrieval.delivery.summary()
    await retrieval.delivery.quiesced(10)
    await client.release(retrieval.found)
    return first, last
