"""`quire bench cache`: block hit rate of a trace over capacities, by the node's own eviction and by others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from quire_storage.core.eviction import LeafArc
from quire_tools.plan.cache_policies import LeafLru, S3Fifo, belady, simulate
from quire_tools.plan.requests import read_trace
from quire_tools.report import Report, Row

_UNLIMITED = 1 << 40


def run(file: Path, capacities: list[int], memory_share: float) -> Report:
    """Capacities in blocks; memory has `memory_share` of each."""
    trace = read_trace(file)
    ceiling = simulate(trace, LeafArc(_UNLIMITED), _UNLIMITED)
    report = Report("cache", {"name": "unlimited cache, same trace", "unit": "block hit rate"})
    with Progress(transient=True) as progress:
        task = progress.add_task("capacities", total=len(capacities) * len(trace) * 3)
        for blocks in capacities:

            def step() -> None:
                progress.advance(task)

            memory_blocks = max(1, int(blocks * memory_share))
            ours = simulate(
                trace,
                LeafArc(blocks),
                blocks,
                LeafArc(memory_blocks, leaves_only=False),
                memory_blocks,
                progress=step,
            )
            lru = simulate(trace, LeafLru(blocks), blocks, progress=step)
            s3fifo = simulate(trace, S3Fifo(blocks), blocks, progress=step)
            measured = {
                "quire": ours.rate,
                "of it memory": ours.memory / ours.total,
                "of it disk": ours.disk / ours.total,
                "LRU": lru.rate,
                "S3-FIFO": s3fifo.rate,
                "Belady": belady(trace, blocks).rate,
            }
            report.rows.append(Row({"blocks": blocks}, measured, ceiling.rate, ours.rate / ceiling.rate))
    report.notes.append(f"{len(trace)} requests, {ceiling.total} blocks; memory has {memory_share:.0%} of the capacity")
    return report


def command(
    trace: Annotated[Path, typer.Option(help="JSON lines with hash_ids, as Mooncake publishes them")],
    capacities: Annotated[str, typer.Option(help="in blocks")] = "1000,3000,10000,20000,50000,100000",
    memory_share: Annotated[float, typer.Option(help="share of the capacity that is memory")] = 0.125,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Block hit rate over capacities: the node's eviction, LRU, S3-FIFO, Belady; the unlimited cache as ceiling."""
    run(trace, [int(text) for text in capacities.split(",")], memory_share).show(json_file, plot)
