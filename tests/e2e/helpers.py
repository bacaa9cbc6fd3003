"""What the end-to-end tests share: small namespaces, random payloads, a store and a checked fetch."""

from __future__ import annotations

import os
import urllib.request

import numpy as np
import numpy.typing as npt

from quire.client import AsyncClient, Buffer, FetchSummary, Lookup, StoreSummary
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability, OnExisting
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.records import records
from quire.wire.channels import ChannelPool, call
from quire.wire.convert_records import records_to
from quire.wire.credentials import Caller
from quire.wire.v1 import orchestrator_pb2
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire_tools.local import LocalCluster

LAYOUT = KvLayout(4, 16, 2, 64, Dtype.BF16)
SMALL_STORAGE = {
    "QUIRE_STORAGE_SLAB_BYTES": str(8 << 20),
    "QUIRE_STORAGE_STAGING_BYTES": str(16 << 20),
    "QUIRE_STORAGE_BLOCK_BYTES": str(2 << 20),
    "QUIRE_STORAGE_REPLICATION_CHECK_S": "0.2",
}
"""Settings of storage nodes with little memory that look after their replicas often."""


def fresh_namespace(layout: KvLayout = LAYOUT) -> Namespace:
    """A namespace that no other test has."""
    return Namespace("test", os.urandom(8).hex(), layout)


def members(cluster: LocalCluster, role: str) -> ChannelPool:
    """Channels as a member of that role has them, in a cluster without mutual TLS."""
    return ChannelPool(caller=Caller(role, cluster.secret.encode()))


def some_keys(namespace: Namespace, chunks: int) -> ChunkKeys:
    return block_keys(namespace, list(range(chunks * namespace.layout.chunk_tokens)))


def random_payload(namespace: Namespace, chunks: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """(layers, chunks, slice bytes) of random bytes."""
    layout = namespace.layout
    shape = (layout.num_layers, chunks, layout.slice_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


async def store(
    client: AsyncClient,
    namespace: Namespace,
    keys: ChunkKeys,
    payload: npt.NDArray[np.uint8],
    *,
    first: int = 0,
    durability: Durability = Durability.LOCAL,
    on_existing: OnExisting = OnExisting.SKIP,
) -> StoreSummary:
    """Store chunks from `first` on; `payload` holds those."""
    buffer = client.allocate(payload.nbytes)
    assert buffer.view is not None
    buffer.view[:] = payload.reshape(-1)
    session = await client.store(namespace, keys, first, buffer, durability=durability, on_existing=on_existing)
    for layer in range(namespace.layout.num_layers):
        session.layer_ready(layer)
    try:
        return await session.commit()
    finally:
        buffer.close()


async def fetch_all(
    client: AsyncClient, found: Lookup, order: DeliveryOrder = DeliveryOrder.LAYERWISE
) -> tuple[npt.NDArray[np.uint8], FetchSummary]:
    """Fetch what was found, layer by layer, each copied at the moment it is announced."""
    layout = found.namespace.layout
    buffer = client.allocate(layout.payload_bytes(found.matched_chunks))
    delivery = await client.fetch(found, buffer, order=order)
    copies = []
    for layer in range(layout.num_layers):
        await delivery.layer(layer)
        copies.append(_layers(buffer, found)[layer].copy())
    summary = await delivery.summary()
    await delivery.quiesced(10)
    buffer.close()
    return np.stack(copies), summary


def _layers(buffer: Buffer, found: Lookup) -> npt.NDArray[np.uint8]:
    layout = found.namespace.layout
    return buffer.layers(layout.num_layers, found.matched_chunks, layout.slice_bytes)


def text_of(address: str) -> str:
    """What a service tells at its metrics' address."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def metric(address: str, name: str, **labels: str) -> float:
    """A sample of what a service tells at its metrics' address."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    for line in text_of(address).splitlines():
        if line.split("{")[0].split(" ")[0] == name and all(each in line for each in wanted):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name} with {labels}")


async def holders_of(cluster: LocalCluster, keys: ChunkKeys) -> list[set[str]]:
    """Return the live holders of each chunk, as the orchestrator lists them."""
    pool = members(cluster, "storage")
    orchestrator: OrchestratorServiceStub = OrchestratorServiceStub(pool.get(cluster.address("orchestrator")))
    request = orchestrator_pb2.LocateRequest(records=records_to(records(keys, 0, len(keys))))
    response = await call(orchestrator.Locate, request, timeout_s=10)
    await pool.close()
    return [set(names.split(",")) - {""} for names in response.holders]
