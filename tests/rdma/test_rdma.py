"""Stores and deliveries by the real services over RDMA verbs, and clients that die, freeze or may pin too little."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from quire.client import AsyncClient
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, fresh_namespace, random_payload, some_keys, store
from tests.polling import eventually
from tests.rdma import ROOT

pytestmark = pytest.mark.skipif("QUIRE_TEST_RDMA" not in os.environ, reason="make test-rdma runs it where a device is")
_CHUNKS: Final = 40
_RATE: Final = 4_000_000
"""Bytes per second: a delivery of 40 MiB takes ten seconds."""
_SENT: Final = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts")
_PACKET_BYTES: Final = 2048
_LIMIT_S: Final = 300.0
_LARGE: Final = KvLayout(16, 16, 8, 128, Dtype.BF16)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A storage node without drives, behind a slow link."""
    settings = {"QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": ""}
    settings |= {"QUIRE_SCHEDULER_LINKS": f"default={_RATE}", "QUIRE_STORAGE_LINK_BYTES_PER_S": str(_RATE)}
    running = LocalCluster(tmp_path_factory.mktemp("rdma"), arena_bytes=256 << 20, settings=settings)
    try:
        running.start(_LIMIT_S)
        yield running
    finally:
        running.stop()


async def _deliveries(client: AsyncClient) -> float:
    return sum(node.stats.get("deliveries", 0) for node in await client.status() if node.node_id == "storage-0")


async def _stored(client: AsyncClient, namespace: Namespace) -> ChunkKeys:
    keys, payload = some_keys(namespace, _CHUNKS), random_payload(namespace, _CHUNKS)
    await store(client, namespace, keys, payload, durability=Durability.MEMORY)
    return keys


@contextlib.asynccontextmanager
async def _receiving(cluster: LocalCluster, client: AsyncClient) -> AsyncIterator[subprocess.Popen[str]]:
    """Run another client, which is in the middle of a delivery."""
    namespace = Namespace("test", os.urandom(8).hex(), _LARGE)
    await _stored(client, namespace)
    command = [sys.executable, "-m", "tests.e2e.vanishing_client", cluster.gateway_address]
    command += [namespace.weight_version, str(_CHUNKS)]
    receiver = await asyncio.to_thread(subprocess.Popen[str], command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert receiver.stdout is not None
        assert await asyncio.to_thread(receiver.stdout.readline) == "receiving\n"
        yield receiver
    finally:
        receiver.kill()
        receiver.wait()


async def _is_served(client: AsyncClient) -> int:
    """Store and receive, and compare. Return the bytes that moved."""
    namespace = fresh_namespace()
    keys, payload = some_keys(namespace, _CHUNKS), random_payload(namespace, _CHUNKS)
    await store(client, namespace, keys, payload, durability=Durability.MEMORY)
    for order in DeliveryOrder:
        delivered, _ = await fetch_all(client, await client.lookup(namespace, keys), order)
        assert np.array_equal(delivered, payload)
    return int(payload.nbytes) * (1 + len(DeliveryOrder))


async def test_what_was_stored_is_delivered_over_verbs(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        packets = int(_SENT.read_text())
        moved_bytes = await _is_served(client)
        assert (int(_SENT.read_text()) - packets) * _PACKET_BYTES >= moved_bytes


async def test_a_killed_client_costs_its_own_delivery(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.gateway_address) as client:
        async with _receiving(cluster, client) as receiver:
            await eventually(lambda: _deliveries(client), "the delivery shows in the stats")
            receiver.kill()
        await _is_served(client)

        async def is_over() -> bool:
            return not await _deliveries(client)

        await eventually(is_over, "the delivery of the killed client ends", timeout_s=60)


async def test_a_frozen_client_delays_no_other(cluster: LocalCluster) -> None:
    """Writes to its memory need nothing of it."""
    async with AsyncClient(cluster.gateway_address) as client, _receiving(cluster, client) as receiver:
        receiver.send_signal(signal.SIGSTOP)
        await _is_served(client)


def test_memory_beyond_the_limit_of_a_user_is_an_error_that_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.rdma.unprivileged"], capture_output=True, text=True, cwd=ROOT, timeout=_LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("ResourceExhausted") and "ulimit -l" in done.stdout, done.stdout + done.stderr[-2000:]
