"""`quire plan kv`: the cost of a deployment per million prompt tokens, by the tiers it has.

After Tutti, §4.3, Eq. 1: GPU plus storage, over throughput. Here the GPU is paid for while it prefills uncached tokens,
and for the stalls that Eq. 3 of ObjectCache predicts at each tier's rate; storage is paid for as long as the trace
lasts. Hit rates come from the trace, simulated by the node's own eviction.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.progress import Progress

from quire.model.errors import InvalidRequest
from quire.model.profile import ComputeProfile, Profiles, load_profile, ttft_s
from quire_storage.core.eviction import LeafArc
from quire_tools.plan.cache_policies import simulate
from quire_tools.plan.requests import read_requests
from quire_tools.report import Report, Row

_HOURS_PER_MONTH: Final = 730.0
_UNLIMITED: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars: a GPU's hour, and a GB's month in memory, on NVMe, in S3."""

    gpu_hour: float
    memory_gb_month: float
    disk_gb_month: float
    object_gb_month: float

    def __post_init__(self) -> None:
        for name in ("gpu_hour", "memory_gb_month", "disk_gb_month", "object_gb_month"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{getattr(self, name)} is negative", field=name)


@dataclass(frozen=True, slots=True)
class PlannedTiers:
    """Capacities in GB; `in_s3`: nothing is ever evicted, what drives do not hold comes from S3."""

    memory_gb: float
    disk_gb: float
    in_s3: bool = False

    @property
    def name(self) -> str:
        parts = [f"{size:g} GB {kind}" for size, kind in ((self.memory_gb, "DRAM"), (self.disk_gb, "NVMe")) if size]
        return " + ".join(parts + ["S3"] * self.in_s3) or "no cache"


@dataclass(frozen=True, slots=True)
class TierRates:
    """GB/s at which each tier delivers."""

    memory: float
    disk: float
    s3: float


def run(
    trace: Path,
    tiers: list[PlannedTiers],
    prices: Prices,
    rates: TierRates,
    profile: ComputeProfile,
    bytes_per_token: int,
    block_tokens: int,
) -> Report:
    """Compute the costs. Raises `InvalidRequest` for a trace without times, or a number that is not positive."""
    for name, value in (
        ("bytes_per_token", bytes_per_token),
        ("block_tokens", block_tokens),
        ("gbps", min(rates.memory, rates.disk, rates.s3)),
    ):
        if value <= 0:
            raise InvalidRequest(f"{value} is not positive", field=name)
    requests = read_requests(trace)
    inputs = np.array([tokens or len(blocks) * block_tokens for blocks, tokens, _ in requests], dtype=np.float64)
    hours = (requests[-1][2] - requests[0][2]) / 3600
    if hours <= 0:
        raise InvalidRequest("its requests have no times", field="trace")
    layer_bytes = bytes_per_token / profile.num_layers
    report = Report(
        "plan kv", {"name": "no cache: everything is computed", "unit": "$ per 1M prompt tokens"}, tall=True
    )
    millions = float(inputs.sum()) / 1e6
    base = float(profile.prefill_s(inputs, np.zeros_like(inputs)).sum()) / 3600 * prices.gpu_hour / millions
    block_gb = block_tokens * bytes_per_token / 1e9
    unique = len({block for blocks, _, _ in requests for block in blocks})
    with Progress(transient=True) as progress:
        task = progress.add_task("tiers", total=len(tiers) * len(requests))
        for tier in tiers:
            hits = _hits([blocks for blocks, _, _ in requests], tier, block_gb, lambda: progress.advance(task))
            cached = np.minimum(hits.sum(axis=0) * block_tokens, inputs - 1)
            windows = profile.window_s(inputs - cached, cached)
            transfer = sum(
                part * block_tokens * layer_bytes / (rate * 1e9)
                for part, rate in zip(hits, (rates.memory, rates.disk, rates.s3), strict=True)
            )
            busy_s = float(ttft_s(transfer, windows, profile.num_layers).sum())
            costs = {
                "GPU $": busy_s / 3600 * prices.gpu_hour / millions,
                "DRAM $": tier.memory_gb * prices.memory_gb_month / _HOURS_PER_MONTH * hours / millions,
                "NVMe $": tier.disk_gb * prices.disk_gb_month / _HOURS_PER_MONTH * hours / millions,
                "S3 $": tier.in_s3 * unique * block_gb * prices.object_gb_month / _HOURS_PER_MONTH * hours / millions,
            }
            total = sum(costs.values())
            computed_s = float(windows.sum()) * profile.num_layers
            measured = {
                "hit rate": float(cached.sum() / inputs.sum()),
                **costs,
                "$ per 1M tokens": total,
                "GPU stalled, %": (1 - computed_s / busy_s) * 100,
            }
            report.rows.append(Row({"tiers": tier.name}, measured, base, base / total))
    report.notes += [
        f"{len(requests)} requests in {hours:.2f} h, {millions:.1f}M prompt tokens, "
        f"{unique * block_gb:.0f} GB of unique KV; {profile.model} on {profile.device} ({profile.source})",
        "prompt tokens only: what decoding costs is the same for all; requests one at a time on each GPU",
    ]
    return report


def _hits(trace: list[list[bytes]], tiers: PlannedTiers, block_gb: float, progress: Any) -> np.ndarray[Any, Any]:
    """Blocks by tier (memory, disk, S3) × request."""
    memory, disk = int(tiers.memory_gb / block_gb), int(tiers.disk_gb / block_gb)
    counts: list[tuple[int, int]] = []
    if memory + disk == 0 and not tiers.in_s3:
        return np.zeros((3, len(trace)))
    below = disk if disk else memory
    above = LeafArc(memory, leaves_only=False) if disk and memory else None
    if below:
        simulate(
            trace,
            LeafArc(below),
            below,
            above,
            memory if above is not None else 0,
            progress=progress,
            observe=lambda *hits_of: counts.append(hits_of),
        )
    else:
        counts = [(0, 0)] * len(trace)
    hits = np.zeros((3, len(trace)))
    hits[:2] = np.array(counts, dtype=np.float64).T
    if not disk:
        hits[0], hits[1] = hits[0] + hits[1], 0
    if tiers.in_s3:
        all_blocks: list[int] = []
        simulate(trace, LeafArc(_UNLIMITED), _UNLIMITED, observe=lambda memory, disk: all_blocks.append(memory + disk))
        hits[2] = np.maximum(0, np.array(all_blocks) - hits[0] - hits[1])
    return hits


def draw(report: Report, path: Path) -> None:
    """Cost by part, stacked, and the hit rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    names = [str(row.params["tiers"]).replace(" + ", "\n") for row in report.rows]
    bottom = np.zeros(len(names))
    for part in ("GPU $", "DRAM $", "NVMe $", "S3 $"):
        values = np.array([row.measured[part] for row in report.rows])
        axes.bar(names, values, bottom=bottom, label=part.removesuffix(" $"))
        bottom += values
    for at, row in enumerate(report.rows):
        axes.annotate(f"{row.measured['hit rate']:.0%} hit", (at, bottom[at]), ha="center", va="bottom", fontsize=8)
    axes.set(ylabel="$ per 1M prompt tokens", title="what a deployment costs, by its tiers")
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def command(
    trace: Annotated[Path, typer.Option(help="JSON lines with timestamp, input_length, hash_ids (Mooncake's format)")],
    memory_gb: Annotated[str, typer.Option(help="DRAM for KV, one or several")] = "256,1024",
    disk_gb: Annotated[str, typer.Option(help="NVMe below the first DRAM size, one or several")] = "1000,4000,16000",
    gpu_hour: Annotated[float, typer.Option(help="$ of a GPU's hour")] = 5.0,
    memory_gb_month: Annotated[float, typer.Option(help="$ (ObjectCache, Table A5: 3–5)")] = 4.0,
    disk_gb_month: Annotated[float, typer.Option(help="$ (Table A5)")] = 0.10,
    object_gb_month: Annotated[float, typer.Option(help="$ (Table A5)")] = 0.02,
    gbps: Annotated[str, typer.Option(help="GB/s from memory, NVMe, S3")] = "12.5,10,2",
    model: Annotated[str, typer.Option(help="name of the model in the profile")] = "Llama-3.1-8B",
    device: Annotated[str, typer.Option(help="name of the device in the profile")] = "a100-80gb",
    profile: Annotated[Path | None, typer.Option(help="a compute profile of your own (`quire profile`)")] = None,
    bytes_per_token: Annotated[int, typer.Option(help="KV of a token, all layers")] = 131_072,
    block_tokens: Annotated[int, typer.Option(help="tokens per block of the trace")] = 512,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Dollars per million prompt tokens by tier, from your prices and a trace."""
    measured = load_profile(profile) if profile is not None else Profiles().find(model, device)
    if measured is None:
        raise InvalidRequest(
            f"there is no profile of {model!r} on {device!r}; `quire profile` makes one", field="device"
        )
    try:
        memories, disks = ([float(part) for part in text.split(",")] for text in (memory_gb, disk_gb))
        rates = TierRates(*(float(part) for part in gbps.split(",")))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"no list of numbers: {error}", field="memory_gb, disk_gb, gbps") from None
    tiers = [
        PlannedTiers(0, 0),
        *(PlannedTiers(size, 0) for size in memories),
        *(PlannedTiers(memories[0], size) for size in disks),
    ]
    tiers.append(PlannedTiers(memories[0], disks[0], in_s3=True))
    prices = Prices(gpu_hour, memory_gb_month, disk_gb_month, object_gb_month)
    report = run(trace, tiers, prices, rates, measured, bytes_per_token=bytes_per_token, block_tokens=block_tokens)
    report.show(json_file, plot, draw=lambda path: draw(report, path))
