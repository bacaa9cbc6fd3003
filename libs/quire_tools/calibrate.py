"""`quire calibrate`: from which payload on layerwise delivery is faster here, and the cost of a wrong threshold.

ObjectCache chooses the mode by W = N·L·S against Θ (Eq. 2), and leaves how sensitive that is to future work. Both modes
are measured over W on a running cluster, with the compute windows of a profile; Θ is where choosing loses least.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import uvloop
from rich.progress import track

from quire.client import AsyncClient
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.layout import KvLayout
from quire.model.profile import ComputeProfile
from quire_tools.report import Report, Row, median
from quire_tools.timed_delivery import QuirePaths

_SALT: Final = b"quire calibrate"


def run(
    gateway: str,
    layout: KvLayout,
    profile: ComputeProfile,
    hit: float,
    payload_max: int,
    rounds: int,
    *,
    object_tier: bool = False,
) -> tuple[Report, int]:
    """Measure; the best Θ, in bytes. `hit`: cached share of the prompts, which gives the windows.

    `object_tier`: only the object tier has the chunks, in place of memory.

    Raises `InvalidRequest` for less than two payloads to compare.
    """
    chunks, sizes = 1, []
    while layout.payload_bytes(chunks) <= payload_max:
        sizes.append(chunks)
        chunks *= 2
    if len(sizes) < 2 or not 0 < hit < 1 or rounds < 1:
        raise InvalidRequest(
            f"{payload_max} bytes, chunks of {layout.chunk_bytes}, hit {hit}, rounds {rounds}", field="payload_max"
        )
    report, theta = uvloop.run(_run(gateway, layout, profile, hit, sizes, rounds, object_tier=object_tier))
    return report, theta


async def _run(
    gateway: str,
    layout: KvLayout,
    profile: ComputeProfile,
    hit: float,
    sizes: list[int],
    rounds: int,
    *,
    object_tier: bool,
) -> tuple[Report, int]:
    times: dict[int, tuple[float, float]] = {}
    async with AsyncClient(gateway, timeout_s=120) as client:
        namespace = Namespace("quire calibrate", "1", layout, _SALT)
        paths = QuirePaths(client, namespace, sizes[-1] * layout.chunk_tokens)
        await paths.store(Durability.OBJECT if object_tier else Durability.MEMORY)
        await paths.deliver(sizes[-1], 0.0, DeliveryOrder.LAYERWISE)

        async def timed(chunks: int, window_s: float, order: DeliveryOrder) -> float:
            if object_tier:
                await paths.give_up_copies()
            return (await paths.deliver(chunks, window_s, order)).ttft_s

        for chunks in track(sizes, "payloads", transient=True):
            cached = chunks * layout.chunk_tokens
            window_s = float(profile.window_s(cached * (1 - hit) / hit, cached))
            chunkwise, layered = [], []
            for _ in range(rounds):
                chunkwise.append(await timed(chunks, window_s, DeliveryOrder.CHUNKWISE))
                layered.append(await timed(chunks, window_s, DeliveryOrder.LAYERWISE))
            times[chunks] = (median(chunkwise), median(layered))
        await paths.evict()
        await paths.close()
    report, theta = _report(layout, times)
    report.notes.append(f"tier: {'objects' if object_tier else 'memory'}")
    report.notes.append(f"windows: {profile.model} on {profile.device}, {hit:.0%} of the prompt cached")
    return report, theta


def _report(layout: KvLayout, times: dict[int, tuple[float, float]]) -> tuple[Report, int]:
    """`times`: TTFT chunkwise and layerwise by number of chunks, ascending."""
    report = Report("calibrate", {"name": "the better mode for each payload", "unit": "TTFT, ms"}, tall=True)
    losses = {}
    for threshold in (*times, 2 * max(times)):
        chosen = [chunkwise if chunks < threshold else layered for chunks, (chunkwise, layered) in times.items()]
        losses[threshold] = sum(
            chosen_s / min(pair) - 1 for chosen_s, pair in zip(chosen, times.values(), strict=True)
        ) / len(times)
    best = min(losses, key=lambda threshold: losses[threshold])
    for chunks, (chunkwise, layered) in times.items():
        measured = {
            "chunkwise, ms": chunkwise * 1e3,
            "layerwise, ms": layered * 1e3,
            "layerwise is faster, %": (chunkwise / layered - 1) * 100,
            "mean loss with Θ here, %": losses[chunks] * 100,
        }
        faster = min(chunkwise, layered)
        chosen_s = chunkwise if chunks < best else layered
        params = {"mode": "by Θ", "W, MiB": layout.payload_bytes(chunks) / 2**20}
        report.rows.append(Row(params, measured, faster * 1e3, faster / chosen_s))
    # From the first payload on means: always layerwise.
    theta = 0 if best == min(times) else layout.payload_bytes(best)
    return report, max(1, theta)


def draw(report: Report, path: Path) -> None:
    """Draw both modes over W, and the average loss of a threshold at W."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left_axes, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    sizes = [row.params["W, MiB"] for row in report.rows]
    for mode in ("chunkwise", "layerwise"):
        left_axes.plot(sizes, [row.measured[f"{mode}, ms"] for row in report.rows], "o-", label=mode)
    left_axes.set(xscale="log", yscale="log", xlabel="payload W, MiB", ylabel="TTFT, ms", title="both modes")
    left_axes.legend()
    right.plot(sizes, [row.measured["mean loss with Θ here, %"] for row in report.rows], "o-")
    right.set(xscale="log", xlabel="threshold Θ, MiB", ylabel="mean loss of TTFT, %", title="what a wrong Θ costs")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
