"""`quire bench ttft`: time to first token by path, context, hit rate and chunk size (ObjectCache, §5.5 and §5.6).

Llama 3.1 8B on an A100, an eighth of its bytes: sizes and link rates are the paper's / 8, compute windows are those of
the profile that ships with Quire (Table A8, extrapolated for hit rates that it does not have).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop
from rich.progress import Progress

from quire.client import AdminClient, AsyncClient
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.layout import Dtype, KvLayout
from quire.model.profile import ComputeProfile, Profiles, ttft_s
from quire_bench.ttft.paths import LocalPaths
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median
from quire_tools.timed_delivery import QuirePaths, Timing

FACTOR: Final = 8
LAYERS: Final = 32
PAPER_GBPS: Final = (100.0, 10.0)
_SALT: Final = b"quire bench ttft"
_SETTLE_S: Final = 1.2
_GBPS: Final = 1e9 / 8
MODEL, DEVICE = "Llama-3.1-8B", "a100-80gb"


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration. `gbps`: of the paper's link; ours is an eighth of it."""

    context: int
    hit: float
    chunk_tokens: int
    gbps: float

    @property
    def cached_tokens(self) -> int:
        return int(self.context * self.hit)

    @property
    def chunks(self) -> int:
        return self.cached_tokens // self.chunk_tokens


def layout_for(chunk_tokens: int) -> KvLayout:
    """An eighth of Llama 3.1 8B's: one KV head of eight."""
    return KvLayout(LAYERS, chunk_tokens, 1, 128, Dtype.BF16)


def shipped_profile() -> ComputeProfile:
    """Compute windows of Llama 3.1 8B on an A100 (ObjectCache, Table A8)."""
    profile = Profiles().find(MODEL, DEVICE)
    assert profile is not None, "it ships with Quire"
    return profile


def check_shapes(contexts: list[int], hits: list[float], chunk_sizes: list[int], rounds: int) -> None:
    """Check the prefixes to measure.

    Raises:
        InvalidRequest: A context is shorter than eight chunks, a share is not between 0 and 1, or there is no round.
    """
    if min(contexts, default=0) < max(chunk_sizes, default=0) * 8 or not all(0 < hit < 1 for hit in hits):
        raise InvalidRequest(f"contexts {contexts}, hits {hits}, chunks {chunk_sizes}", field="contexts")
    if rounds < 1:
        raise InvalidRequest(f"{rounds}", field="rounds")


def run(
    contexts: list[int], hits: list[float], chunk_sizes: list[int], rates_gbps: list[float], rounds: int, *, cold: bool
) -> Report:
    """Raises `InvalidRequest` for what cannot be measured."""
    check_shapes(contexts, hits, chunk_sizes, rounds)
    if min(rates_gbps, default=0) <= 0:
        raise InvalidRequest(f"{rates_gbps}", field="gbps")
    report = Report(
        "ttft", {"name": "opt-local-LW: layer-major in local memory, same run", "unit": "TTFT, ms"}, tall=True
    )
    cells = [
        Cell(context, hit, size, gbps)
        for size in chunk_sizes
        for gbps in rates_gbps
        for context in contexts
        for hit in hits
    ]
    with Progress(transient=True) as progress:
        task = progress.add_task("configurations", total=len(cells) * (2 if cold else 1))
        for size in chunk_sizes:
            mine = [cell for cell in cells if cell.chunk_tokens == size]
            warm = _on_a_cluster(mine, rounds, lambda: progress.advance(task), on_drives=False)
            from_drives = _on_a_cluster(mine, rounds, lambda: progress.advance(task), on_drives=True) if cold else {}
            report.rows += [_row(cell, warm[cell], from_drives.get(cell)) for cell in mine]
    report.rows.sort(key=lambda row: (-row.params["Gbps"], row.params["context"], row.params["hit"]))
    report.notes += [
        f"sizes and link rates are the paper's / {FACTOR}; the Gbps are the paper's; windows from: "
        f"{shipped_profile().source}",
        "Eq. 3 with what a fetch of the same chunks without any compute showed in the same run: when its first layer "
        "came, and how long each other took",
        "from memory: chunks in the storage node's memory; cold: on its drives only, read with O_DIRECT where it works",
    ]
    return report


def _row(cell: Cell, times: dict[str, Timing], cold: dict[str, Timing] | None) -> Row:
    floor, ours = times["opt-local-LW"].ttft_s, times["S3Agg-LW"].ttft_s
    window_s = _window_s(cell)
    probe = times["probe"]
    predicted = probe.first_s - probe.layer_s + float(ttft_s(probe.layer_s, window_s, LAYERS))
    measured = {
        "compute, ms": window_s * LAYERS * 1e3,
        **{
            f"{name}, ms": times[name].ttft_s * 1e3
            for name in ("Local-DRAM-CW", "Local-DRAM-LW", "S3Batch-CW", "S3Agg-LW")
        },
        "cold S3Agg-LW, ms": cold["S3Agg-LW"].ttft_s * 1e3 if cold else float("nan"),
        "Eq. 3, ms": predicted * 1e3,
        "off Eq. 3, %": (ours / predicted - 1) * 100,
        "added, ms": (ours - floor) * 1e3,
        "added, %": (ours / floor - 1) * 100,
        "GB/s": cell.chunks * layout_for(cell.chunk_tokens).slice_bytes / probe.layer_s / 1e9,
    }
    params = {"Gbps": cell.gbps, "context": cell.context, "hit": cell.hit, "G": cell.chunk_tokens}
    return Row(params, measured, floor * 1e3, floor / ours)


def _window_s(cell: Cell) -> float:
    return float(shipped_profile().window_s(cell.context - cell.cached_tokens, cell.cached_tokens))


def settings_for(tokens: int, layout: KvLayout, *, on_drives: bool) -> dict[str, str]:
    """A cluster whose storage node holds that many tokens in memory, or on drives and hardly any in memory."""
    need = layout.payload_bytes(tokens // layout.chunk_tokens)
    drives = {"QUIRE_STORAGE_DRIVE_BYTES": str(need + need // 4 + (256 << 20))}
    return {
        "QUIRE_SCHEDULER_LINKS": f"default={int(max(PAPER_GBPS) * _GBPS / FACTOR)}",
        "QUIRE_STORAGE_LINK_BYTES_PER_S": str(int(max(PAPER_GBPS) * _GBPS / FACTOR)),
        "QUIRE_STORAGE_ARENA_BYTES": str((64 << 20) if on_drives else need + (256 << 20)),
        "QUIRE_STORAGE_SLAB_BYTES": str(16 << 20),
        "QUIRE_STORAGE_OBJECT_URL": "",
        "QUIRE_STORAGE_TRANSFER_TIMEOUT_S": "300",
        **(drives if on_drives else {"QUIRE_STORAGE_DRIVES": ""}),
    }


def _on_a_cluster(
    cells: list[Cell], rounds: int, done: Callable[[], object], *, on_drives: bool
) -> dict[Cell, dict[str, Timing]]:
    layout = layout_for(cells[0].chunk_tokens)
    tokens = max(cell.cached_tokens for cell in cells)
    settings = settings_for(tokens, layout, on_drives=on_drives)
    with tempfile.TemporaryDirectory() as folder, LocalCluster(Path(folder), settings=settings) as cluster:
        return dict(uvloop.run(_measure(cluster, cells, rounds, done, on_drives=on_drives)))


async def _measure(
    cluster: LocalCluster, cells: list[Cell], rounds: int, done: Callable[[], object], *, on_drives: bool
) -> dict[Cell, dict[str, Timing]]:
    layout = layout_for(cells[0].chunk_tokens)
    tokens = max(cell.cached_tokens for cell in cells)
    results: dict[Cell, dict[str, Timing]] = {}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(cluster.gateway_address, timeout_s=300))
        operator = await stack.enter_async_context(AdminClient(cluster.admin_address, cluster.secret))
        ours = QuirePaths(client, Namespace("bench ttft", "1", layout, _SALT), tokens)
        await ours.store(Durability.LOCAL if on_drives else Durability.MEMORY)
        local = None if on_drives else LocalPaths(layout, tokens // layout.chunk_tokens)
        for gbps in sorted({cell.gbps for cell in cells}, reverse=True):
            await set_link(operator, ours, gbps)
            for cell in (cell for cell in cells if cell.gbps == gbps):
                results[cell] = await _cell(ours, local, cell, rounds)
                done()
        await ours.close()
        if local is not None:
            local.close()
    return results


async def set_link(operator: AdminClient, ours: QuirePaths, gbps: float) -> None:
    """The paper's link, by the cap of the tenant; returns when the cluster goes by it."""
    await operator.set_tenant(_SALT, cap_bytes_per_s=int(gbps * _GBPS / FACTOR))
    await asyncio.sleep(_SETTLE_S)
    await ours.forget_leases()


async def _cell(ours: QuirePaths, local: LocalPaths | None, cell: Cell, rounds: int) -> dict[str, Timing]:
    """Medians by path, the paths in turns."""
    window_s, chunks = _window_s(cell), cell.chunks
    times: dict[str, list[Timing]] = {}
    for _ in range(rounds):
        if local is not None:
            times.setdefault("opt-local-LW", []).append(await local.optimum(chunks, window_s))
            times.setdefault("Local-DRAM-CW", []).append(await local.chunkwise(chunks, window_s))
            times.setdefault("Local-DRAM-LW", []).append(await local.layerwise(chunks, window_s))
            whole = await ours.deliver(chunks, window_s, DeliveryOrder.CHUNKWISE)
            times.setdefault("S3Batch-CW", []).append(whole)
        probe = await ours.deliver(chunks, 0.0, DeliveryOrder.LAYERWISE)
        times.setdefault("probe", []).append(probe)
        times.setdefault("S3Agg-LW", []).append(await ours.deliver(chunks, window_s, DeliveryOrder.LAYERWISE))
    return {name: _median(each) for name, each in times.items()}


def _median(times: list[Timing]) -> Timing:
    return Timing(
        median([each.ttft_s for each in times]),
        median([each.first_s for each in times]),
        median([each.layer_s for each in times]),
        median([each.stall_s for each in times]),
    )
