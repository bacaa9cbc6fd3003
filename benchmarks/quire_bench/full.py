"""Stores at full nodes, where each store has to evict other chunks, against the same stores at nodes with room.

Prefixes are stored one after the other until the nodes have been filled twice. The first quarter of the stores finds
room; the last quarter does not.
"""

from __future__ import annotations

import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from rich.console import Console

from quire.client import AsyncClient
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest, PartlyStored
from quire.model.hashing import Namespace, block_keys
from quire.model.layout import Dtype, KvLayout
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median, spread

_HEADS, _HEAD_DIM, _LAYERS = 8, 128, 4
_NODE_BYTES: Final = 256 << 20
_FILLED: Final = 2
_LEVELS: Final = {"drives": Durability.LOCAL, "memory": Durability.MEMORY}


def run(tiers: list[str], chunk_kib: list[int], nodes: list[int], mib: int) -> Report:
    """Store prefixes of `mib` MiB in chunks of `chunk_kib`, each in a call of its own. Raises `InvalidRequest`."""
    report = Report("full", {"name": "the same stores while there was room", "unit": "GB/s"}, tall=True)
    for tier, size, count in product(tiers, chunk_kib, nodes):
        if tier not in _LEVELS:
            raise InvalidRequest(f"{tier!r}; there are drives and memory", field="tier")
        token_bytes = KvLayout(_LAYERS, 1, _HEADS, _HEAD_DIM, Dtype.BF16).chunk_bytes
        layout = KvLayout(_LAYERS, max(1, (size << 10) // token_bytes), _HEADS, _HEAD_DIM, Dtype.BF16)
        with Console().status(f"{tier}, chunks of {size} KiB, nodes: {count}"):
            report.rows.append(_measure(tier, layout, count, max(1, (mib << 20) // layout.chunk_bytes)))
    report.notes.append(
        f"each node has {_NODE_BYTES >> 20} MiB; stores one after the other, client on the same machine"
    )
    report.notes.append("of chunks below 64 KiB the headers fill a drive before the bytes do")
    return report


def label(params: dict[str, Any]) -> str:
    """Return the name of a row in a figure."""
    return f"{params['tier']}, {params['chunk KiB']} KiB, nodes: {params['nodes']}"


def _measure(tier: str, layout: KvLayout, nodes: int, chunks: int) -> Row:
    settings = {"QUIRE_STORAGE_OBJECT_URL": ""} | ({"QUIRE_STORAGE_DRIVES": ""} if tier == "memory" else {})
    payload = layout.payload_bytes(chunks)
    with tempfile.TemporaryDirectory() as name:
        arena = _NODE_BYTES if tier == "memory" else 2 * _NODE_BYTES
        with LocalCluster(
            Path(name), storage_nodes=nodes, arena_bytes=arena, drive_bytes=_NODE_BYTES, decoders=0, settings=settings
        ) as cluster:
            count = _FILLED * nodes * _NODE_BYTES // payload
            rates = uvloop.run(_stores(cluster, _LEVELS[tier], layout, chunks, count))
    roomy, full = rates[: count // 4], rates[-count // 4 :]
    cut_short = 100 * rates.count(0.0) / count
    measured = {"GB/s": median(full), "spread": spread(full), "stores cut short, of 100": cut_short}
    params = {"tier": tier, "chunk KiB": layout.chunk_bytes >> 10, "nodes": nodes, "chunks": chunks}
    return Row(params, measured, median(roomy), median(full) / median(roomy))


async def _stores(cluster: LocalCluster, level: Durability, layout: KvLayout, chunks: int, count: int) -> list[float]:
    """Return GB/s of each store, 0 for one that was not acknowledged whole."""
    payload, rates = layout.payload_bytes(chunks), list[float]()
    async with AsyncClient(cluster.gateway_address) as client:
        source = client.allocate(payload)
        assert source.view is not None
        source.view[:] = np.random.default_rng(3).integers(0, 256, payload, dtype=np.uint8)
        for number in range(count):
            namespace = Namespace("bench", str(number), layout)
            keys = block_keys(namespace, list(range(chunks * layout.chunk_tokens)))
            began = time.perf_counter()
            session = await client.store(namespace, keys, 0, source, durability=level, complete=True)
            try:
                await session.commit()
                rates.append(payload / (time.perf_counter() - began) / 1e9)
            except PartlyStored:
                rates.append(0.0)
        source.close()
    return rates
