"""Cold loads from an object tier that delays some of its answers: the slowest loads against the usual ones.

The baseline reads whole objects by obstore, eight at a time: fewer requests than Quire sends, none of them twice.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import numpy as np
import uvloop
from rich.progress import track

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.layout import KvLayout
from quire_bench.bare_reads import BareReads, open_bare, paths_of
from quire_bench.cold_cluster import ColdCluster, cold_cluster, endpoint_of
from quire_bench.filling import fill, llama_layout
from quire_bench.object_tier import deliver_cold
from quire_bench.slow_link import SlowLink
from quire_tools.report import Report, Row

_WARM_UP: Final = 20


def run(url: str, chunk_tokens: int, chunks: int, layers: int, loads: int, slow_percent: float, slow_ms: int) -> Report:
    """Measure. Raises `InvalidRequest` where there is no endpoint to delay."""
    link = SlowLink(endpoint_of(url, is_delayed=True), 0.0, slow_percent / 100, slow_ms / 1e3)
    layout = llama_layout(layers, chunk_tokens)
    with cold_cluster(url, link, layout.payload_bytes(chunks), layout.chunk_bytes) as cold:
        ours, bare = uvloop.run(_loads(cold, layout, chunks, loads))
    report = Report("hedging", {"name": "bare obstore reads of whole objects, each sent once", "unit": "p99 / p50"})
    p50, p99, bare_p50, bare_p99 = (np.percentile(times, at) * 1e3 for times in (ours, bare) for at in (50, 99))
    params = {"G": chunk_tokens, "N": chunks, "layers": layers, "loads": loads, "slow %": slow_percent}
    measured = {"p50 ms": p50, "p99 ms": p99, "p99 / p50": p99 / p50, "bare p50 ms": bare_p50, "bare p99 ms": bare_p99}
    report.rows.append(Row(params, measured, bare_p99 / bare_p50, (bare_p99 / bare_p50) / (p99 / p50)))
    report.notes.append(f"{slow_percent:g} % of the requests wait {slow_ms} ms")
    report.tall = True
    return report


async def _loads(cold: ColdCluster, layout: KvLayout, chunks: int, loads: int) -> tuple[list[float], list[float]]:
    """Seconds of each load, by Quire and bare."""
    namespace = Namespace("bench", "1", layout)
    keys = block_keys(namespace, list(range(chunks * layout.chunk_tokens)), HashAlgorithm.BLAKE3)
    ours, bare = list[float](), list[float]()
    async with AsyncClient(cold.cluster.gateway_address) as client:
        target = client.allocate(layout.payload_bytes(chunks))
        await fill(client, namespace, keys, Durability.OBJECT)
        store = open_bare(cold.place, cold.endpoint)
        reads = BareReads(store, await asyncio.to_thread(paths_of, store, keys), layout.num_layers, layout.slice_bytes)
        for number in track(range(loads + _WARM_UP), "loads", transient=True):
            assert await client.demote(namespace, keys) == chunks, "the object tier has them all"
            _, took_s = await deliver_cold(client, namespace, keys, target)
            started = time.perf_counter()
            await reads.objects()
            if number >= _WARM_UP:
                ours.append(took_s)
                bare.append(time.perf_counter() - started)
    return ours, bare
