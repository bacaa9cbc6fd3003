"""`quire bench ttft --tier object`: prefixes that the object tier alone has, layer by layer against whole objects."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import uvloop
from rich.progress import Progress

from quire.client import AsyncClient
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.hashing import Namespace
from quire.model.profile import ttft_s
from quire_bench.bare_reads import BareReads, open_bare, paths_of
from quire_bench.cold_cluster import ColdCluster, cold_cluster, endpoint_of
from quire_bench.slow_link import SlowLink
from quire_bench.ttft.run import (
    FACTOR,
    LAYERS,
    PAPER_GBPS,
    Cell,
    check_shapes,
    layout_for,
    settings_for,
    shipped_profile,
)
from quire_tools.report import Report, Row, median, spread
from quire_tools.timed_delivery import QuirePaths

_WARM_UP: Final = 2


def run(
    url: str, contexts: list[int], hits: list[float], chunk_sizes: list[int], latency_ms: list[int], rounds: int
) -> Report:
    """Measure each context, hit rate, chunk size and latency.

    Raises:
        InvalidRequest: A latency is requested without an endpoint to delay; or prefixes that cannot be measured.
    """
    check_shapes(contexts, hits, chunk_sizes, rounds)
    endpoint = endpoint_of(url, is_delayed=any(latency_ms))
    report = Report(
        "ttft", {"name": "whole objects by obstore, 8 at a time, then all layers; same run", "unit": "TTFT, ms"}
    )
    report.tall = True
    cases = list(product(contexts, hits, chunk_sizes, latency_ms))
    with Progress(transient=True) as progress:
        task = progress.add_task("cold prefixes", total=len(cases))
        for context, hit, chunk_tokens, delay_ms in cases:
            cell = Cell(context, hit, chunk_tokens, max(PAPER_GBPS))
            layout = layout_for(chunk_tokens)
            settings = settings_for(cell.cached_tokens, layout, on_drives=False)
            link = SlowLink(endpoint, delay_ms / 1e3)
            with cold_cluster(url, link, layout.payload_bytes(cell.chunks), layout.chunk_bytes, settings) as cold:
                measured = uvloop.run(_measure(cold, cell, rounds))
            params: dict[str, Any] = {"context": context, "hit": hit, "G": chunk_tokens, "latency ms": delay_ms}
            objects_ms = measured.pop("objects")
            report.rows.append(Row(params, measured, objects_ms, measured["TTFT, ms"] / objects_ms))
            progress.advance(task)
    report.notes += [
        f"object tier: {url or 'a folder of this machine'}; sizes are Llama 3.1 8B's / {FACTOR}; windows from: "
        f"{shipped_profile().source}",
        "Eq. 3 with what a cold fetch of the same chunks without any compute showed in the same run",
        "ratio: of the time to first token, less than 1 is quicker; the baseline delivers nothing to an engine",
    ]
    return report


async def _measure(cold: ColdCluster, cell: Cell, rounds: int) -> dict[str, float]:
    """Medians in ms. "objects": of the baseline."""
    layout = layout_for(cell.chunk_tokens)
    window_s = float(shipped_profile().window_s(cell.context - cell.cached_tokens, cell.cached_tokens))
    took_s, predicted_s, firsts_s, waits_s, objects_s = ([] for _ in range(5))
    async with AsyncClient(cold.cluster.gateway_address, timeout_s=300) as client:
        paths = QuirePaths(client, Namespace("bench cold", "1", layout), cell.cached_tokens)
        await paths.store(Durability.OBJECT)
        store = open_bare(cold.place, cold.endpoint)
        bare = BareReads(store, paths_of(store, paths.keys), LAYERS, layout.slice_bytes)
        for turn in range(rounds + _WARM_UP):
            await paths.give_up_copies()
            probe = await paths.deliver(cell.chunks, 0.0, DeliveryOrder.LAYERWISE)
            await paths.give_up_copies()
            ours = await paths.deliver(cell.chunks, window_s, DeliveryOrder.LAYERWISE)
            whole_s = await bare.objects()
            if turn >= _WARM_UP:
                took_s.append(ours.ttft_s)
                firsts_s.append(ours.first_s)
                waits_s.append(ours.stall_s)
                predicted_s.append(probe.first_s - probe.layer_s + float(ttft_s(probe.layer_s, window_s, LAYERS)))
                objects_s.append(whole_s + window_s * LAYERS)
        await paths.close()
    times = {
        "compute, ms": window_s * LAYERS,
        "TTFT, ms": median(took_s),
        "first layer, ms": median(firsts_s),
        "stall, ms": median(waits_s),
        "Eq. 3, ms": median(predicted_s),
        "objects": median(objects_s),
    }
    measured = {name: seconds * 1e3 for name, seconds in times.items()}
    return measured | {"off Eq. 3, %": (median(took_s) / median(predicted_s) - 1) * 100, "spread": spread(took_s)}
