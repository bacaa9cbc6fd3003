"""A prefix that one client stores and another one receives: followed, against looked up when it is stored.

Real services; both clients are in this process, and bytes go by UCX. Deliveries have the link's rate; stores are not
slowed down. Each round has a new prefix. The two ways take turns.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
import uvloop
from rich.progress import track

from quire.client import AsyncClient, Buffer
from quire.client.retrieval import Retrieval
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import KvLayout
from quire.transport import OFF, data_plane
from quire_bench.filling import llama_layout
from quire_tools.cli.options import Json, Plot, numbers
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median, spread

_WAIT_S: Final = 60.0
_GB: Final = 1e9


@dataclass(slots=True)
class _Times:
    """Seconds by round, from the first layer's announcement to the last layer's arrival; memcpy of a layer."""

    followed: list[float] = field(default_factory=list)
    stored: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)


def run(tokens: int, chunk_tokens: int, layers: int, windows: list[float], link_gbps: float, rounds: int) -> Report:
    """Measure. `windows`: time that the producer computes for each layer, in times of a layer's transfer."""
    layout, chunks = llama_layout(layers, chunk_tokens), tokens // chunk_tokens
    payload = layout.payload_bytes(chunks)
    link = round(link_gbps * _GB)
    baseline = "a look-up and a delivery once the whole store is acknowledged, same run"
    report = Report("follow", {"name": baseline, "unit": "ms"}, tall=True)
    for window in windows:
        settings = {
            "QUIRE_SHARED_MEMORY": OFF,
            "QUIRE_STORAGE_DRIVES": "",
            "QUIRE_STORAGE_OBJECT_URL": "",
            "QUIRE_STORAGE_LINK_BYTES_PER_S": str(link),
            "QUIRE_SCHEDULER_LINKS": f"default={link}",
        }
        arena = (2 * (rounds + 1) + 2) * max(payload, 64 << 20)
        with (
            tempfile.TemporaryDirectory(prefix="quire-follow-") as folder,
            LocalCluster(Path(folder), arena_bytes=arena, settings=settings) as cluster,
        ):
            times = uvloop.run(_rounds(cluster, layout, chunks, window * payload / layers / link, rounds))
        measured = {
            "ms": median(times.followed) * 1e3,
            "spread": spread(times.followed),
            "the link alone, ms": payload / link * 1e3,
            "computing alone, ms": window * payload / link * 1e3,
            "memcpy GB/s": payload / layers / median(times.memcpy) / _GB,
        }
        ratio = median(times.followed) / median(times.stored)
        report.rows.append(Row({"window, layers": window}, measured, median(times.stored) * 1e3, ratio))
    report.notes.append(
        f"{tokens} tokens, {chunks} chunks, {layers} layers, {payload / 2**20:.0f} MiB, link of {link_gbps:g} GB/s, "
        f"{rounds} rounds; kept in memory"
    )
    report.notes.append("window: time that the producer computes for each layer, in times of a layer's transfer")
    return report


async def _rounds(cluster: LocalCluster, layout: KvLayout, chunks: int, window_s: float, rounds: int) -> _Times:
    times, namespace = _Times(), Namespace("bench", "1", layout)
    draw, layer_bytes = np.random.default_rng(5), chunks * layout.slice_bytes
    async with AsyncExitStack() as stack:
        producer, consumer = [
            await stack.enter_async_context(AsyncClient(cluster.gateway_address, transport=data_plane(OFF)))
            for _ in range(2)
        ]
        source, target = (client.allocate(layout.payload_bytes(chunks)) for client in (producer, consumer))
        assert source.view is not None and target.view is not None
        source.view[:] = draw.integers(0, 256, source.length, dtype=np.uint8)
        pair = _Pair(producer, consumer, source, target, namespace, window_s)
        for number in track(range(rounds + 1), "rounds", transient=True):
            followed, stored = [await way(_keys(namespace, chunks, draw)) for way in (pair.follow, pair.store_first)]
            started = time.perf_counter()
            np.copyto(target.view[:layer_bytes], source.view[:layer_bytes])
            if number:
                times.memcpy.append(time.perf_counter() - started)
                times.followed.append(followed)
                times.stored.append(stored)
    return times


def _keys(namespace: Namespace, chunks: int, draw: np.random.Generator) -> ChunkKeys:
    tokens = draw.integers(0, 1 << 20, chunks * namespace.layout.chunk_tokens)
    return block_keys(namespace, tokens.tolist(), HashAlgorithm.BLAKE3)


@dataclass(slots=True)
class _Pair:
    """A producer and a consumer of one prefix."""

    producer: AsyncClient
    consumer: AsyncClient
    source: Buffer
    target: Buffer
    namespace: Namespace
    window_s: float

    async def follow(self, keys: ChunkKeys) -> float:
        """Return the seconds from the first layer's announcement to the last layer's arrival, of a follower."""
        return await self._timed(keys, lambda: self._retrieve(keys, _WAIT_S), at_once=True)

    async def store_first(self, keys: ChunkKeys) -> float:
        """Return the same of a consumer that looks up when the store is acknowledged."""
        return await self._timed(keys, lambda: self._retrieve(keys, 0.0), at_once=False)

    async def _timed(
        self, keys: ChunkKeys, retrieve: Callable[[], Coroutine[Any, Any, Retrieval]], *, at_once: bool
    ) -> float:
        assert self.target.view is not None and self.source.view is not None
        self.target.view[:] = 0
        began = asyncio.create_task(retrieve()) if at_once else None
        session = await self.producer.store(self.namespace, keys, 0, self.source, durability=Durability.MEMORY)
        retrieval = await began if began is not None else None
        started = time.perf_counter()
        storing = asyncio.create_task(self._produce(session))
        if retrieval is None:
            await storing
            retrieval = await retrieve()
        assert retrieval.delivery is not None, "it is there, or arrives"
        for layer in range(self.namespace.layout.num_layers):
            await retrieval.delivery.layer(layer)
        took_s = time.perf_counter() - started
        await storing
        await retrieval.delivery.summary()
        await retrieval.delivery.quiesced(10)
        await session.quiesced(10)
        if not np.array_equal(self.target.view, self.source.view):
            raise InvalidRequest("other bytes arrived than were stored", field="follow")
        return took_s

    async def _produce(self, session: Any) -> None:
        for layer in range(self.namespace.layout.num_layers):
            await asyncio.sleep(self.window_s)
            session.layer_ready(layer)
        await session.commit()

    async def _retrieve(self, keys: ChunkKeys, follow_s: float) -> Retrieval:
        return await self.consumer.retrieve(
            self.namespace, keys, self.target, order=DeliveryOrder.LAYERWISE, lease_ttl_ms=0, follow_s=follow_s
        )


def command(
    tokens: Annotated[int, typer.Option(help="of the prefix")] = 2048,
    chunk_tokens: Annotated[int, typer.Option(help="tokens of a chunk")] = 16,
    layers: Annotated[int, typer.Option(help="layers of the model (Llama 3.1 8B otherwise)")] = 8,
    windows: Annotated[str, typer.Option(help="computing of a layer, in times of its transfer")] = "0,0.5,1,2",
    link: Annotated[float, typer.Option(help="rate of the link, GB/s")] = 1.0,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 7,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Time until a prefix has arrived that another client is still storing: followed, against stored first."""
    if min(tokens // max(1, chunk_tokens), layers, rounds) < 1 or link <= 0:
        raise InvalidRequest(f"{tokens}, {chunk_tokens}, {layers}, {link}, {rounds}", field="tokens, …, rounds")
    run(tokens, chunk_tokens, layers, numbers(windows, float), link, rounds).show(json_file, plot)
