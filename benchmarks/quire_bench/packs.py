"""Bare reads of a prefix whose chunks are an object each, against packs of consecutive chunks in layer-major objects.

A decision about the format: what packs could save at most, with nothing of Quire in between. Prices are those of S3
Standard in us-east-1.
"""

from __future__ import annotations

import asyncio
import os
from itertools import product
from typing import Any, Final

import obstore
import uvloop
from rich.console import Console

from quire.model.layout import KvLayout
from quire_bench.bare_reads import BareReads, open_bare
from quire_bench.filling import llama_layout
from quire_bench.slow_link import SlowLink
from quire_tools.report import Report, Row, median

_PACK_BYTES: Final = 64 << 20
_PUT_USD, _GET_USD = 0.005 / 1000, 0.0004 / 1000
_GB_MONTH_USD: Final = 0.023
_LOADS: Final = (1, 30)
"""Of the prefix, in a month."""
_REQUESTS_A_LOAD: Final = 3
_AT_ONCE: Final = 8


def run(url: str, chunk_sizes: list[int], context: int, layers: int, rounds: int, latency_ms: list[int]) -> Report:
    """Measure each chunk size and latency."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    report = Report("packs", {"name": "packs of 64 MiB, same bytes, best ranges and concurrency", "unit": "ms"})
    for chunk_tokens in chunk_sizes:
        layout = llama_layout(layers, chunk_tokens)
        place = f"{url.rstrip('/')}/{os.urandom(6).hex()}"
        report.rows += uvloop.run(_of_size(place, endpoint, layout, context // chunk_tokens, rounds, latency_ms))
    report.notes.append("USD: a GB for a month, its PUTs, and the GETs of 1 and of 30 loads in three ranges an object")
    report.tall = True
    return report


async def _of_size(
    place: str, endpoint: str, layout: KvLayout, chunks: int, rounds: int, latency_ms: list[int]
) -> list[Row]:
    together = max(1, _PACK_BYTES // layout.chunk_bytes)
    kinds = {"chunks": (chunks, 1), "packs": (-(-chunks // together), together)}
    paths = {kind: [f"{kind}/{at}" for at in range(count)] for kind, (count, _) in kinds.items()}
    store, rows = open_bare(place, endpoint), []
    room = asyncio.Semaphore(_AT_ONCE)

    async def put(path: str, size: int) -> None:
        async with room:
            await obstore.put_async(store, path, os.urandom(size))

    with Console().status(f"G = {layout.chunk_tokens}: {chunks} chunks are written, twice"):
        for kind, (_, of) in kinds.items():
            await asyncio.gather(*(put(path, of * layout.chunk_bytes) for path in paths[kind]))
    for delay_ms in latency_ms:
        with SlowLink(endpoint, delay_ms / 1e3) as link:
            far = open_bare(place, link.address)
            times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            reads = {
                kind: BareReads(far, paths[kind], layout.num_layers, of * layout.slice_bytes)
                for kind, (_, of) in kinds.items()
            }
            for _, kind in product(range(rounds), kinds):
                times[kind].append((await reads[kind].first(), await reads[kind].all()))
        rows.append(_row(layout, chunks, together, delay_ms, times))
    await obstore.delete_async(store, [path for each in paths.values() for path in each])
    return rows


def _row(
    layout: KvLayout, chunks: int, together: int, delay_ms: int, times: dict[str, list[tuple[float, float]]]
) -> Row:
    first, whole = ({kind: median([each[at] for each in of]) * 1e3 for kind, of in times.items()} for at in (0, 1))
    params: dict[str, Any] = {"G": layout.chunk_tokens, "N": chunks, "a pack": together, "latency ms": delay_ms}
    measured = {
        "first layer, ms": first["chunks"],
        "packs' first, ms": first["packs"],
        "all layers, ms": whole["chunks"],
    }
    for loads in _LOADS:
        per_gb = {of: 1e9 / (of * layout.chunk_bytes) for of in (1, together)}
        usd = {
            of: _GB_MONTH_USD + count * (_PUT_USD + loads * _REQUESTS_A_LOAD * _GET_USD) for of, count in per_gb.items()
        }
        measured[f"USD, {loads} loads"] = usd[1]
        measured[f"of packs, {loads} loads"] = usd[together]
    return Row(params, measured, whole["packs"], whole["packs"] / whole["chunks"])
