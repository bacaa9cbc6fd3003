"""More of `quire bench ttft`: over the link's rate, over the hit rate by tier, and with a real model's compute."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.progress import Progress, track

from quire.client import AdminClient, AsyncClient, Client
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.hashing import Namespace
from quire_bench.ttft.run import (
    FACTOR,
    LAYERS,
    Cell,
    layout_for,
    set_link,
    settings_for,
    shipped_profile,
)
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median
from quire_tools.timed_delivery import QuirePaths, Timing

_SALT: Final = b"quire bench ttft"
_SWEEP: Final = ((16_384, 0.5), (16_384, 0.875), (65_536, 0.5), (65_536, 0.875))
_SWEEP_GBPS: Final = (100.0, 60.0, 40.0, 30.0, 20.0, 15.0, 10.0, 7.0, 5.0, 3.0)
_BUBBLE_CONTEXT: Final = 32_768
_BUBBLE_HITS: Final = (0.25, 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375, 0.9921875)
_CHUNK_TOKENS: Final = 64


def sweep() -> Report:
    """Added TTFT of layerwise deliveries over the rate of the link (ObjectCache, Figure 15)."""
    report = Report("ttft", {"name": "the same shape on the fastest link, same run", "unit": "TTFT, ms"}, tall=True)
    layout = layout_for(_CHUNK_TOKENS)
    tokens = max(int(context * hit) for context, hit in _SWEEP)
    settings = settings_for(tokens, layout, on_drives=False)
    with tempfile.TemporaryDirectory() as folder, LocalCluster(Path(folder), settings=settings) as cluster:
        times = dict(uvloop.run(_sweep(cluster, tokens)))
    for context, hit in _SWEEP:
        best = min(times[context, hit, gbps].ttft_s for gbps in _SWEEP_GBPS)
        window_s = float(shipped_profile().window_s(context * (1 - hit), context * hit))
        needed = context * hit * layout.slice_bytes / _CHUNK_TOKENS * FACTOR / window_s * 8 / 1e9
        for gbps in _SWEEP_GBPS:
            ttft = times[context, hit, gbps].ttft_s
            measured = {
                "added TTFT, %": (ttft / best - 1) * 100,
                "Eq. 4, %": LAYERS * max(0.0, needed / gbps - 1) * window_s / best * 100,
                "TTFT, ms": ttft * 1e3,
                "perfect overlap": needed,
            }
            params = {"shape": f"{context // 1024}K {hit:.1%}", "Gbps": gbps}
            report.rows.append(Row(params, measured, best * 1e3, best / ttft))
    report.notes.append(
        f"sizes and rates are the paper's / {FACTOR}, printed as the paper's; perfect overlap: r* = s/c"
    )
    return report


async def _sweep(cluster: LocalCluster, tokens: int) -> dict[tuple[int, float, float], Timing]:
    times = {}
    async with (
        AsyncClient(cluster.gateway_address, timeout_s=300) as client,
        AdminClient(cluster.admin_address, cluster.secret) as operator,
    ):
        ours = QuirePaths(client, Namespace("bench sweep", "1", layout_for(_CHUNK_TOKENS), _SALT), tokens)
        await ours.store(Durability.MEMORY)
        for gbps in track(_SWEEP_GBPS, "link rates", transient=True):
            await set_link(operator, ours, gbps)
            for context, hit in _SWEEP:
                cell = Cell(context, hit, _CHUNK_TOKENS, gbps)
                window_s = float(shipped_profile().window_s(context - cell.cached_tokens, cell.cached_tokens))
                times[context, hit, gbps] = await ours.deliver(cell.chunks, window_s, DeliveryOrder.LAYERWISE)
        await ours.close()
    return times


def bubble() -> Report:
    """Compute and stall by hit rate, from memory, from the pool's drives, from the object tier (Tutti, Figure 13)."""
    report = Report("ttft", {"name": "compute alone, same windows", "unit": "ms"}, tall=True)
    with Progress(transient=True) as progress:
        task = progress.add_task("tiers", total=3 * len(_BUBBLE_HITS))
        for tier in ("memory", "pool", "object"):
            times = _bubble_tier(tier, lambda: progress.advance(task))
            rows = []
            for hit, timing in times.items():
                compute_ms = (
                    float(shipped_profile().prefill_s(_BUBBLE_CONTEXT * (1 - hit), _BUBBLE_CONTEXT * hit)) * 1e3
                )
                measured = {
                    "stall, ms": timing.stall_s * 1e3,
                    "compute, ms": compute_ms,
                    "TTFT, ms": timing.ttft_s * 1e3,
                }
                rows.append(Row({"tier": tier, "hit": hit}, measured, compute_ms, compute_ms / (timing.ttft_s * 1e3)))
            crossing = _crossover(rows)
            for row in rows:
                row.measured["crossover"] = crossing
            report.rows += rows
    report.notes += [
        f"{_BUBBLE_CONTEXT // 1024}K, G = {_CHUNK_TOKENS}; sizes are Llama 3.1 8B's / {FACTOR}, the link 100 Gbps / "
        f"{FACTOR}, windows of the shipped A100 profile (its samples end at 87.5%: beyond, extrapolated)",
        "crossover: hit rate at which stall first exceeds compute (–: it never does)",
    ]
    return report


def _crossover(rows: list[Row]) -> float:
    """Linear between the two measured hit rates around it."""
    before = None
    for row in rows:
        excess = row.measured["stall, ms"] - row.measured["compute, ms"]
        if excess > 0:
            if before is None:
                return float(row.params["hit"])
            share = -before[1] / (excess - before[1])
            return float(before[0] + share * (row.params["hit"] - before[0]))
        before = (row.params["hit"], excess)
    return float("nan")


def _bubble_tier(tier: str, done: Any) -> dict[float, Timing]:
    layout = layout_for(_CHUNK_TOKENS)
    whole = sum(int(_BUBBLE_CONTEXT * hit) for hit in _BUBBLE_HITS)
    settings = settings_for(whole, layout, on_drives=tier == "pool")
    with tempfile.TemporaryDirectory() as folder:
        if tier == "object":
            settings["QUIRE_STORAGE_OBJECT_URL"] = f"{folder}/objects"
        with LocalCluster(Path(folder), settings=settings) as cluster:
            return dict(uvloop.run(_bubble_fetch(cluster.gateway_address, tier, done)))


async def _bubble_fetch(gateway: str, tier: str, done: Any) -> dict[float, Timing]:
    """A chain of its own for each hit rate: what the object tier gave once, the node's memory has."""
    durability = {"memory": Durability.MEMORY, "pool": Durability.LOCAL, "object": Durability.OBJECT}[tier]
    times = {}
    async with AsyncClient(gateway, timeout_s=300) as client:
        chains = {}
        for hit in _BUBBLE_HITS:
            namespace = Namespace(f"bench bubble {hit}", "1", layout_for(_CHUNK_TOKENS), _SALT)
            chains[hit] = QuirePaths(client, namespace, int(_BUBBLE_CONTEXT * hit))
            await chains[hit].store(durability)
        for hit, paths in chains.items():
            if tier == "object":
                await paths.give_up_copies()
            window_s = float(shipped_profile().window_s(_BUBBLE_CONTEXT * (1 - hit), _BUBBLE_CONTEXT * hit))
            chunks = int(_BUBBLE_CONTEXT * hit) // _CHUNK_TOKENS
            times[hit] = await paths.deliver(chunks, window_s, DeliveryOrder.LAYERWISE)
            await paths.close()
            done()
    return times


def real_model(rounds: int) -> Report:
    """The demo's transformer on this machine: recompute, chunkwise, layerwise, with its own measured profile."""
    import torch

    from quire.integrations.profiling import measure_profile
    from quire.integrations.transformers import PrefixCache
    from quire_tools.cli.demos.kv import demo_model

    model = demo_model()
    profile = measure_profile(model, "quire-demo-llama", "this machine", [32, 128, 512], [0, 1024, 3072], rounds=2)
    report = Report("ttft", {"name": "recompute of everything, same run", "unit": "TTFT, ms"})
    with tempfile.TemporaryDirectory() as folder:
        profile.save(Path(folder) / "profile.json")
        settings = {"QUIRE_SCHEDULER_LINKS": "default=400000000", "QUIRE_PROFILES": folder}
        with (
            LocalCluster(Path(folder) / "cluster", settings=settings) as cluster,
            Client(cluster.gateway_address) as client,
        ):
            for context, hit in ((2048, 0.5), (2048, 0.875), (4096, 0.5), (4096, 0.875)):
                torch.manual_seed(context)
                prompt = torch.randint(0, 256, (1, context))
                times: dict[str, list[float]] = {}
                stalls: list[float] = []
                for turn in range(rounds):
                    for name in ("recompute", "chunkwise", "layerwise"):
                        order = DeliveryOrder.CHUNKWISE if name == "chunkwise" else DeliveryOrder.LAYERWISE
                        cache = PrefixCache(
                            model,
                            client,
                            model_id="quire-demo-llama",
                            tenant_salt=f"{context} {hit}".encode(),
                            order=order,
                            device="this machine" if name == "layerwise" else "",
                        )
                        if turn == 0 and name == "recompute":
                            cache.prefill(prompt[:, : int(context * hit)]).wait_stored()
                        result = cache.prefill(prompt, reuse=name != "recompute", store=False)
                        times.setdefault(name, []).append(result.ttft_s)
                        if name == "layerwise":
                            stalls.append(sum(layer.stall_s for layer in result.layers))
                        cache.close()
                cached = result.reused_tokens
                predicted = float(profile.prefill_s(context - cached, cached))
                whole, ours = median(times["recompute"]), median(times["layerwise"])
                measured = {
                    "chunkwise, ms": median(times["chunkwise"]) * 1e3,
                    "layerwise, ms": ours * 1e3,
                    "of it stalled, ms": median(stalls) * 1e3,
                    "compute by the profile, ms": predicted * 1e3,
                    "times faster": whole / ours,
                }
                report.rows.append(Row({"context": context, "hit": hit}, measured, whole * 1e3, whole / ours))
    report.notes.append(
        "the demo's transformer computes for real; link 0.4 GB/s; compute windows by a profile measured now"
    )
    return report
