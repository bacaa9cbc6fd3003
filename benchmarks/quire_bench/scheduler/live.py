"""The paper's workloads for real: concurrent deliveries through the services, windows emulated by timers.

Sizes, and with them rates, are scaled by one factor: a slice has a 64th of the bytes of Llama 3.1 8B's. The layers,
the chunks of 64 tokens and the windows of Table A8 are the paper's; `speed` shortens windows and raises rates alike.
A request's TTFT is the time until its last layer's window ends; what it adds is against the same request alone on a
link without a limit, in the same run. What the link carried at most in any second (of `speed` 1) is looked at too: new
deliveries send their first layers before they have rates, and the sum must stay within the budget.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import uvloop
from rich.console import Console

from quire.client import AsyncClient, Buffer, Lookup
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.layout import Dtype, KvLayout
from quire.model.urgency import Urgency
from quire_bench.scheduler.workloads import GBPS, PaperMeasurements, Request, Workload
from quire_scheduler.core.curves import Array
from quire_scheduler.core.factory import POLICIES
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median
from quire_tools.timed_delivery import consume

_FACTOR: Final = 64
_LAYOUT: Final = KvLayout(32, 64, 1, 16, Dtype.BF16)  # 4 KiB a slice; Llama 3.1 8B's are 256 KiB
_AT_ONCE: Final = " at once"
LIVE_POLICIES: Final = (*POLICIES, f"adaptive{_AT_ONCE}")
_EPOCH_MS: Final = 100
_UNLIMITED: Final = 100_000_000_000


@dataclass(frozen=True, slots=True)
class _Consumed:
    """`arrivals`: when each layer was there, monotonic seconds."""

    ttft_s: float
    rate_bytes_per_s: float
    layer_bytes: int
    arrivals: list[float]


@dataclass(slots=True)
class _Stored:
    """A request's prefix in the cluster, and where it is delivered to."""

    request: Request
    found: Lookup
    buffer: Buffer


def run_live(
    names: list[str], speed: float, rounds: int, policies: list[str]
) -> tuple[Report, dict[str, dict[str, Array]]]:
    """Raises `InvalidRequest` for a workload that the paper does not have, and for a speed that is none."""
    paper = PaperMeasurements()
    workloads = [workload for workload in paper.workloads if workload.name in names]
    if len(workloads) != len(names) or not names:
        raise InvalidRequest(f"{','.join(names)}; there are A, B, C", field="only")
    if unknown := set(policies) - set(LIVE_POLICIES):
        raise InvalidRequest(f"{', '.join(sorted(unknown))}; there are {', '.join(LIVE_POLICIES)}", field="policies")
    if not 0 < speed <= 100 or rounds < 1:
        raise InvalidRequest(f"speed {speed}, rounds {rounds}", field="speed")
    report = Report("scheduler", {"name": "each request alone, no limit", "unit": "TTFT in all, ms"}, tall=True)
    allocations: dict[str, dict[str, Array]] = {}
    with Console().status("") as status:
        for workload in workloads:
            scale = speed / _FACTOR
            status.update(f"workload {workload.name}: alone")
            alone = _run(workload, "equal", _UNLIMITED, speed, 1, together=False)[0]
            base = sum(each.ttft_s for each in alone)
            rates: dict[str, Array] = {}
            cases = [(name, name.removesuffix(_AT_ONCE), name.endswith(_AT_ONCE)) for name in policies]
            for label, policy, at_once in cases:
                status.update(f"workload {workload.name}: {label}")
                tries = rounds if policy == "adaptive" else 1
                budget = int(workload.budget * scale)
                runs = _run(workload, policy, budget, speed, tries, together=True, at_once=at_once)
                settled = runs[-max(1, tries // 2) :]
                added = median([sum(one.ttft_s for one in each) - base for each in settled]) * speed * 1e3
                mean = np.array([each.rate_bytes_per_s for each in settled[-1]]) / scale
                rates[label] = mean
                measured = {
                    **{
                        f"{request.name}, Gbps": rate / GBPS
                        for request, rate in zip(workload.requests, mean.tolist(), strict=True)
                    },
                    "most in a second, of the link": max(_peak(each, 1.0 / speed) for each in runs) / budget * speed,
                    "added TTFT, ms": added,
                    "Table A12, ms": paper.published_added_ms(workload.name, label),
                }
                whole = base * speed * 1e3
                row = Row({"workload": workload.name, "policy": label}, measured, whole, whole / (whole + added))
                report.rows.append(row)
            allocations[workload.name] = rates
    report.notes += [
        f"sizes and rates are the paper's / {_FACTOR}, windows those of Table A8 / {speed:g}, rates then · {speed:g}; "
        "printed as the paper's",
        f"the Gbps are means over a delivery: what comes free goes to those that still run, with the next epoch of "
        f"{_EPOCH_MS / speed:g} ms",
        f"adaptive: median of the later half of {rounds} rounds; the others: one round",
    ]
    return report, allocations


def _run(
    workload: Workload,
    policy: str,
    link_bytes_per_s: int,
    speed: float,
    rounds: int,
    *,
    together: bool,
    at_once: bool = False,
) -> list[list[_Consumed]]:
    """By round and request."""
    settings = {
        "QUIRE_SCHEDULER_LINKS": f"default={link_bytes_per_s}",
        "QUIRE_SCHEDULER_POLICY": policy,
        "QUIRE_SCHEDULER_EPOCH_MS": str(max(5, round(_EPOCH_MS / speed))),
        "QUIRE_SCHEDULER_MARGIN_SHARE": str(5.0 / workload.cap_gbps),
        "QUIRE_SCHEDULER_AT_ONCE": "1" if at_once else "0",
        "QUIRE_STORAGE_DRIVES": "",
        "QUIRE_STORAGE_OBJECT_URL": "",
        "QUIRE_STORAGE_TRANSFER_TIMEOUT_S": "300",
    }
    need = sum(request.bytes_per_layer * request.layers for request in workload.requests) // _FACTOR
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(Path(folder), arena_bytes=2 * need + (256 << 20), settings=settings) as cluster,
    ):
        return list(uvloop.run(_rounds(cluster.gateway_address, workload, speed, rounds, together=together)))


def _peak(round_: list[_Consumed], window_s: float) -> float:
    """The most bytes that arrived in any window of this length; a layer counts when it is complete."""
    came = sorted((at, each.layer_bytes) for each in round_ for at in each.arrivals)
    times = np.array([at for at, _ in came])
    upto = np.concatenate([[0], np.cumsum([size for _, size in came])])
    return float((upto[np.searchsorted(times, times + window_s)] - upto[:-1]).max())


async def _rounds(
    gateway: str, workload: Workload, speed: float, rounds: int, *, together: bool
) -> list[list[_Consumed]]:
    results = []
    async with AsyncClient(gateway, timeout_s=300) as client:
        stored = [await _store(client, request) for request in workload.requests]
        for _ in range(rounds):
            if together:
                results.append(list(await asyncio.gather(*(_consume(client, each, speed) for each in stored))))
                await asyncio.sleep(0.3)  # reports of stalls, and what was granted, settle
            else:
                results.append([await _consume(client, each, speed) for each in stored])
    return results


async def _store(client: AsyncClient, request: Request) -> _Stored:
    namespace = Namespace(f"bench {request.name}", "1", _LAYOUT)
    chunks = request.bytes_per_layer // _FACTOR // _LAYOUT.slice_bytes
    keys = block_keys(namespace, list(range(chunks * _LAYOUT.chunk_tokens)), HashAlgorithm.BLAKE3)
    buffer = client.allocate(_LAYOUT.payload_bytes(chunks))
    session = await client.store(namespace, keys, 0, buffer, durability=Durability.MEMORY)
    for layer in range(_LAYOUT.num_layers):
        session.layer_ready(layer)
    await session.commit()
    return _Stored(request, await client.lookup(namespace, keys, lease_ttl_ms=300_000), buffer)


async def _consume(client: AsyncClient, stored: _Stored, speed: float) -> _Consumed:
    """Take layer after layer, computing for the window of each; the rate is the mean from first to last layer."""
    window_s = stored.request.window_ms / 1e3 / speed
    started = time.monotonic()
    urgency = Urgency(compute_window_us=max(1, round(window_s * 1e6)))
    delivery = await client.fetch(stored.found, stored.buffer, order=DeliveryOrder.LAYERWISE, urgency=urgency)

    async def arrival(layer: int) -> float:
        await delivery.layer(layer)
        return delivery.arrived_ns[layer] / 1e9

    timing = await consume(arrival, delivery.num_layers, window_s, started)
    await delivery.summary()
    await delivery.quiesced(30)
    size = stored.request.bytes_per_layer // _FACTOR
    arrivals = [each / 1e9 for each in delivery.arrived_ns]
    return _Consumed(timing.ttft_s, size / max(timing.layer_s, 1e-9), size, arrivals)
