"""What placement makes of links: one prefix over several nodes, and one that many clients want at once.

Each storage node has a link of its own, which the scheduler keeps to a budget far below what this machine can do, so
that the links are the bound and not the processors that all nodes share here. Nodes and clients are real; bytes are
compared with what was stored.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
import uvloop
from rich.console import Console

from quire.client import AsyncClient, Buffer
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.nodes import Role
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median

_LAYOUT: Final = KvLayout(32, 16, 4, 128, Dtype.BF16)  # 1 MiB a chunk, as a model of 4 GQA heads has
_SPACE: Final = Namespace("bench links", "1", _LAYOUT)
_IDLE_S: Final = 3.0
_GONE_S: Final = 60.0


@dataclass(slots=True)
class _Crowd:
    """What the clients of one prefix saw. `holders`: nodes that had it, by second."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)
    gone_s: float = float("nan")


def run(link_mb_per_s: int, chunks: int, rounds: int, clients: int, at_once: int, hot_chunks: int) -> Report:
    """A prefix over one, two and three nodes, then many clients that want the same one, with and without copies."""
    budget = link_mb_per_s * 1_000_000
    report = Report(
        "links", {"name": "the links' budgets together; of the crowd one link's", "unit": "MB/s"}, tall=True
    )
    with Console().status("") as status:
        for nodes in (1, 2, 3):
            status.update(f"a prefix over {nodes} nodes")
            seconds, used = _prefix(nodes, budget, chunks, rounds)
            rate = _LAYOUT.payload_bytes(chunks) / seconds / 1e6
            measured = {"nodes that have it": float(used), "s": seconds, "MB/s": rate}
            whole = nodes * link_mb_per_s
            report.rows.append(Row({"one prefix over": nodes}, measured, whole, rate / whole))
        for hot_share in (0.0, 0.5):
            status.update(f"{clients} clients of one prefix, {'copied' if hot_share else 'not copied'} when hot")
            crowd = _crowd(budget, hot_share, clients, at_once, hot_chunks)
            rate = clients * _LAYOUT.payload_bytes(hot_chunks) / crowd.seconds / 1e6
            measured = {
                "s": crowd.seconds,
                "MB/s": rate,
                "p50, s": median(crowd.latencies),
                "p99, s": float(np.percentile(crowd.latencies, 99)),
                "holders at most": float(max(crowd.holders)),
                "s until one again": crowd.gone_s,
            }
            label = {"clients of one prefix": clients, "copies when hot": "yes" if hot_share else "no"}
            report.rows.append(Row(label, measured, link_mb_per_s, rate / link_mb_per_s))
    size = _LAYOUT.payload_bytes(chunks) >> 20
    report.notes += [
        f"one prefix: {chunks} chunks, {size} MiB, median of {rounds}; crowd: {hot_chunks} MiB each, "
        f"{at_once} at a time, 3 nodes, copies idle for {_IDLE_S:g} s are given up",
        "links are budgets of the scheduler; all nodes run on this machine",
    ]
    return report


def _settings(budget: int, nodes: int, hot_share: float) -> dict[str, str]:
    return {
        "QUIRE_SCHEDULER_LINKS": ",".join(f"storage-{number}={budget}" for number in range(nodes)),
        "QUIRE_STORAGE_LINK_BYTES_PER_S": str(budget),
        "QUIRE_STORAGE_HOT_SHARE": str(hot_share),
        "QUIRE_STORAGE_HOT_IDLE_S": str(_IDLE_S),
        "QUIRE_STORAGE_DRIVES": "",
        "QUIRE_STORAGE_OBJECT_URL": "",
    }


def _prefix(nodes: int, budget: int, chunks: int, rounds: int) -> tuple[float, int]:
    """Median seconds of a delivery, and how many nodes the prefix lies on."""
    arena = 2 * _LAYOUT.payload_bytes(chunks) + (256 << 20)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            Path(folder),
            storage_nodes=nodes,
            arena_bytes=arena,
            own_links=True,
            settings=_settings(budget, nodes, 0.0),
        ) as cluster,
    ):
        measured: tuple[float, int] = uvloop.run(_deliveries(cluster.gateway_address, chunks, rounds))
        return measured


async def _deliveries(gateway: str, chunks: int, rounds: int) -> tuple[float, int]:
    async with AsyncClient(gateway, timeout_s=300) as client:
        keys, stored = await _store(client, chunks)
        buffer, times = client.allocate(_LAYOUT.payload_bytes(chunks)), list[float]()
        for _ in range(rounds):
            times.append(await _fetch(client, keys, buffer))
        assert buffer.view is not None and bytes(buffer.view[: len(stored)]) == stored, "what was stored"
        found = await client.lookup(_SPACE, keys, lease_ttl_ms=0)
        return median(times), len({each.node_id for each in found.ranges})


def _crowd(budget: int, hot_share: float, clients: int, at_once: int, chunks: int) -> _Crowd:
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            Path(folder),
            storage_nodes=3,
            arena_bytes=512 << 20,
            own_links=True,
            settings=_settings(budget, 3, hot_share),
        ) as cluster,
    ):
        crowd: _Crowd = uvloop.run(_many(cluster.gateway_address, clients, at_once, chunks, wait=hot_share > 0))
        return crowd


async def _many(gateway: str, clients: int, at_once: int, chunks: int, *, wait: bool) -> _Crowd:
    async with AsyncClient(gateway, timeout_s=300) as client:
        keys, stored = await _store(client, chunks)
        crowd, left = _Crowd(), iter(range(clients))
        watching = asyncio.create_task(_watch(client, crowd))
        started = time.perf_counter()

        async def one_after_the_other() -> None:
            buffer = client.allocate(_LAYOUT.payload_bytes(chunks))
            for _ in left:
                crowd.latencies.append(await _fetch(client, keys, buffer))
            assert buffer.view is not None and bytes(buffer.view[: len(stored)]) == stored, "what was stored"
            buffer.close()

        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
        crowd.seconds = time.perf_counter() - started
        watching.cancel()
        idle_since = time.perf_counter()
        while wait and time.perf_counter() - idle_since < _GONE_S:
            if await _copies(client) == 0:
                crowd.gone_s = time.perf_counter() - idle_since
                break
            await asyncio.sleep(0.5)
        return crowd


async def _watch(client: AsyncClient, crowd: _Crowd) -> None:
    while True:
        crowd.holders.append(1 + await _copies(client))
        await asyncio.sleep(1.0)


async def _copies(client: AsyncClient) -> int:
    nodes = await client.status()
    return int(sum(node.stats.get("hot copies", 0) for node in nodes if node.role is Role.STORAGE))


async def _store(client: AsyncClient, chunks: int) -> tuple[ChunkKeys, bytes]:
    """Store a prefix; its keys, and the bytes of its first layer."""
    keys = block_keys(_SPACE, list(range(chunks * _LAYOUT.chunk_tokens)), HashAlgorithm.BLAKE3)
    buffer = client.allocate(_LAYOUT.payload_bytes(chunks))
    assert buffer.view is not None
    rng = np.random.default_rng(1)
    np.frombuffer(buffer.view, dtype=np.uint8)[:] = rng.integers(0, 256, _LAYOUT.payload_bytes(chunks), dtype=np.uint8)
    first = bytes(buffer.view[: chunks * _LAYOUT.slice_bytes])
    session = await client.store(_SPACE, keys, 0, buffer, durability=Durability.MEMORY)
    for layer in range(_LAYOUT.num_layers):
        session.layer_ready(layer)
    await session.commit()
    buffer.close()
    return keys, first


async def _fetch(client: AsyncClient, keys: ChunkKeys, buffer: Buffer) -> float:
    """Look up and fetch all of it, layer by layer; seconds."""
    started = time.perf_counter()
    found = await client.lookup(_SPACE, keys, lease_ttl_ms=60_000)
    delivery = await client.fetch(found, buffer, order=DeliveryOrder.LAYERWISE)
    summary = await delivery.summary()
    assert summary.usable_chunks == len(keys), summary
    await delivery.quiesced(30)
    taken_s = time.perf_counter() - started
    await client.release(found)
    return taken_s


def command(
    link: Annotated[int, typer.Option(help="budget of each node's link, MB/s")] = 100,
    chunks: Annotated[int, typer.Option(help="of the prefix, 1 MiB each")] = 192,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 3,
    clients: Annotated[int, typer.Option(help="clients at the same time")] = 1000,
    at_once: Annotated[int, typer.Option(help="how many clients fetch at the same time")] = 32,
    hot_chunks: Annotated[int, typer.Option(help="of the prefix that all clients want")] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Delivery of one prefix over 1, 2 and 3 nodes with links of their own, and of one that many clients want."""
    run(link, chunks, rounds, clients, at_once, hot_chunks).show(json_file, plot)
