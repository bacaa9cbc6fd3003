"""Processes that die, freeze or change their mind in the middle: what they held is given back, others go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.client import AsyncClient, Lookup
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import PeerLost, QuireError, TargetInvalid, Unavailable
from quire.model.hashing import Namespace
from quire.model.layout import Dtype, KvLayout
from quire.transport import OFF, data_plane
from quire_server.redis import PrefixIndex, connect
from quire_server.telemetry import configure
from quire_tools.local import LocalCluster
from tests.e2e.helpers import fetch_all, metric, random_payload, some_keys, store
from tests.polling import eventually

ROOT = Path(__file__).resolve().parents[2]
LARGE = KvLayout(16, 16, 8, 128, Dtype.BF16)  # 1 MiB per chunk
CHUNKS = 48
RATE = 20_000_000  # bytes per second: a delivery of 48 MiB takes two and a half seconds


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One storage node behind a slow link, so that there is a middle to be killed in; traces on."""
    settings = {"QUIRE_SCHEDULER_LINKS": f"default={RATE}", "QUIRE_STORAGE_LINK_BYTES_PER_S": str(RATE)}
    folder = tmp_path_factory.mktemp("slow")
    with LocalCluster(folder, arena_bytes=256 << 20, settings=settings, trace=True) as running:
        yield running


async def _stored(client: AsyncClient) -> tuple[Namespace, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    namespace = Namespace("test", os.urandom(8).hex(), LARGE)
    payload = random_payload(namespace, CHUNKS)
    await store(client, namespace, some_keys(namespace, CHUNKS), payload, durability=Durability.MEMORY)
    return namespace, payload


async def _idle(client: AsyncClient) -> bool:
    """No delivery at the storage node, none admitted at the scheduler."""
    stats = {node.node_id: node.stats for node in await client.status()}
    return not stats["storage-0"]["deliveries"] and not stats["scheduler"]["deliveries"]


async def _busy(client: AsyncClient) -> bool:
    return not await _idle(client)


async def test_a_vanished_client_frees_pins_lease_and_rate(slow: LocalCluster) -> None:
    """kill -9 of a client in the middle of its delivery: the node's delivery ends, rate and lease come back at once."""
    async with AsyncClient(slow.gateway_address) as client:
        namespace, _ = await _stored(client)
        keys = some_keys(namespace, CHUNKS)
        command = [sys.executable, "-m", "tests.e2e.vanishing_client", slow.gateway_address]
        victim = await asyncio.to_thread(
            subprocess.Popen[str],
            [*command, namespace.weight_version, str(CHUNKS)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        try:
            assert victim.stdout is not None
            assert await asyncio.to_thread(victim.stdout.readline) == "receiving\n"
            redis = connect(slow.redis_url)
            index = PrefixIndex(redis)
            assert await index.pins(keys.bucket_of(CHUNKS - 1)), "leased"
            await eventually(lambda: _busy(client), "the delivery shows in the stats")
        finally:
            victim.kill()
            victim.wait()
        await eventually(lambda: _idle(client), "the delivery is over")

        async def given_back() -> bool:
            return not await index.pins(keys.bucket_of(CHUNKS - 1))

        await eventually(given_back, "the lease")
        await redis.aclose()
        assert await client.evict(namespace, keys) == CHUNKS, "no pin is left on the slots"


async def test_a_cancelled_delivery_ends_with_a_quiesce(slow: LocalCluster) -> None:
    """Until the node has said that it stopped, the buffer is refused; afterwards nothing changes in it any more."""
    async with AsyncClient(slow.gateway_address) as client:
        namespace, payload = await _stored(client)
        found = await client.lookup(namespace, some_keys(namespace, CHUNKS))
        buffer = client.allocate(payload.nbytes)
        assert buffer.view is not None
        delivery = await client.fetch(found, buffer, order=DeliveryOrder.LAYERWISE)
        await delivery.layer(1)
        delivery.abandon()
        with pytest.raises(TargetInvalid, match="in use"):
            await client.fetch(found, buffer)
        with pytest.raises(TargetInvalid, match="in use"):
            buffer.close()
        with pytest.raises(PeerLost):
            await delivery.layer(15)
        await delivery.cancel()
        buffer.view[:] = 7
        await asyncio.sleep(0.5)
        assert (buffer.view == 7).all()
        buffer.close()
        await eventually(lambda: _idle(client), "nothing runs on")


async def test_an_abandoned_store_keeps_nothing_and_gives_the_buffer_back(slow: LocalCluster) -> None:
    """A store cancelled before its last layer: nothing is indexed, no slot stays taken, the buffer is reusable."""
    async with AsyncClient(slow.gateway_address) as client:
        namespace = Namespace("test", os.urandom(8).hex(), LARGE)
        keys, payload = some_keys(namespace, CHUNKS), random_payload(namespace, CHUNKS)
        used = metric(slow.metrics["storage-0"], "quire_node_used_bytes")
        buffer = client.allocate(payload.nbytes)
        session = await client.store(namespace, keys, 0, buffer, durability=Durability.MEMORY)
        for layer in range(LARGE.num_layers - 1):
            session.layer_ready(layer)
        await asyncio.sleep(0.3)
        await session.cancel()
        assert not buffer.is_busy
        assert (await client.lookup(namespace, keys)).matched_chunks == 0

        async def given_back() -> bool:
            return metric(slow.metrics["storage-0"], "quire_node_used_bytes") <= used

        await eventually(given_back, "the slots are free again")
        assert buffer.view is not None
        buffer.view[:] = payload.reshape(-1)
        again = await client.store(namespace, keys, 0, buffer, durability=Durability.MEMORY)
        for layer in range(LARGE.num_layers):
            again.layer_ready(layer)
        assert (await again.commit()).stored_chunks == CHUNKS


async def test_pacing_follows_the_granted_rate(slow: LocalCluster) -> None:
    """The outcome names the scheduler's rate, and the delivery took as long as that rate says, within a tenth."""
    async with AsyncClient(slow.gateway_address) as client:
        namespace, payload = await _stored(client)
        loop = asyncio.get_running_loop()
        for _ in range(3):
            found = await client.lookup(namespace, some_keys(namespace, CHUNKS))
            started = loop.time()
            got, summary = await fetch_all(client, found)
            assert loop.time() - started > 0.9 * payload.nbytes / RATE
            assert np.array_equal(got, payload)
            (outcome,) = summary.outcomes
            assert outcome.rate_bytes_per_s == RATE
            if outcome.scheduled:  # a scheduler that this machine holds up is done without
                return
        raise AssertionError("no delivery was scheduled")


async def test_without_a_scheduler_nodes_fall_back_and_say_so(slow: LocalCluster) -> None:
    async with AsyncClient(slow.gateway_address) as client:
        namespace, payload = await _stored(client)
        found = await client.lookup(namespace, some_keys(namespace, CHUNKS))
        slow.kill("scheduler")
        try:
            got, summary = await fetch_all(client, found)
            assert np.array_equal(got, payload)
            assert not summary.outcomes[0].scheduled and summary.outcomes[0].rate_bytes_per_s == RATE
        finally:
            await asyncio.to_thread(slow.restart, "scheduler")


async def test_a_killed_storage_node_is_an_error_and_then_a_miss(slow: LocalCluster) -> None:
    """kill -9 in the middle of a delivery: layers raise, the buffer comes back; soon look-ups promise nothing there."""
    async with AsyncClient(slow.gateway_address) as client:
        namespace, payload = await _stored(client)
        keys = some_keys(namespace, CHUNKS)
        found = await client.lookup(namespace, keys)
        buffer = client.allocate(payload.nbytes)
        delivery = await client.fetch(found, buffer, order=DeliveryOrder.LAYERWISE)
        await delivery.layer(0)
        slow.kill("storage-0")
        try:
            with pytest.raises(Unavailable):
                await delivery.layer(15)
            summary = await delivery.summary()
            assert summary.usable_chunks == 0 and summary.outcomes[0].error_code
            await delivery.quiesced(15)
            buffer.close()

            async def is_miss() -> bool:
                return (await client.lookup(namespace, keys, lease_ttl_ms=0)).matched_chunks == 0

            await eventually(is_miss, "a dead node's chunks are misses")
        finally:
            await asyncio.to_thread(slow.restart, "storage-0")


async def test_a_frozen_storage_node_does_not_free_the_buffer(slow: LocalCluster) -> None:
    """SIGSTOP: the client may give up, but the buffer stays lent until the node is heard of again."""
    async with AsyncClient(slow.gateway_address) as client:
        namespace, payload = await _stored(client)
        found = await client.lookup(namespace, some_keys(namespace, CHUNKS))
        buffer = client.allocate(payload.nbytes)
        delivery = await client.fetch(found, buffer, order=DeliveryOrder.LAYERWISE)
        await delivery.layer(0)
        slow.kill("storage-0", signal.SIGSTOP)
        try:
            with pytest.raises(QuireError, match="no word from storage-0"):
                await delivery.cancel(1)
            assert buffer.is_busy
        finally:
            slow.kill("storage-0", signal.SIGCONT)
        await delivery.quiesced(15)
        buffer.close()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["fetch", "retrieve"])
async def test_no_memory_is_lent_before_a_storage_node_was_reached(slow: LocalCluster, by: str) -> None:
    """SIGSTOP before a client's first connection by UCX: nothing would tell it if that node died with its memory."""
    async with AsyncClient(slow.gateway_address) as client:
        namespace, payload = await _stored(client)
        found = await client.lookup(namespace, some_keys(namespace, CHUNKS))
    slow.kill("storage-0", signal.SIGSTOP)
    try:
        async with asyncio.timeout(30), AsyncClient(slow.gateway_address, transport=data_plane(OFF)) as late:
            buffer = late.allocate(payload.nbytes)
            with pytest.raises(PeerLost, match="no way to storage-0"):
                if by == "fetch":
                    await late.fetch(found, buffer)
                else:
                    await late.retrieve(namespace, some_keys(namespace, CHUNKS), buffer)
            buffer.close()  # nothing has it
    finally:
        slow.kill("storage-0", signal.SIGCONT)


async def test_one_trace_goes_through_every_service(slow: LocalCluster) -> None:
    """Look-up and fetch leave spans of one trace in gateway, orchestrator, storage and scheduler, one root."""
    script = (
        "import asyncio, sys; from tests.e2e.test_failures import traced_fetch; asyncio.run(traced_fetch(sys.argv[1]))"
    )
    environment = {**os.environ, "QUIRE_TRACE_FOLDER": str(slow.folder / "traces")}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", script, slow.gateway_address],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    trace_id = done.stdout.split()[-1]

    def spans() -> list[dict[str, object]]:
        lines = [line for path in (slow.folder / "traces").glob("*.jsonl") for line in path.read_text().splitlines()]
        lines = [line for line in lines if line.endswith("}")]  # one may be half written
        return [span for span in map(json.loads, lines) if span["trace_id"] == trace_id]

    async def complete() -> bool:
        found = spans()
        ids = {span["span_id"] for span in found}
        roots = [span["name"] for span in found if span["parent_id"] not in ids]
        took_part = {str(span["service"]) for span in found}
        return {"gateway", "orchestrator", "storage", "scheduler"} <= took_part and roots == ["test.request"]

    await eventually(complete, "every service took part, under one root")
    deliver = next(span for span in spans() if span["name"] == "quire.storage.deliver")
    events = deliver["events"]
    assert isinstance(events, list) and len(events) == LARGE.num_layers


async def traced_fetch(gateway: str) -> None:
    """What the traced process does: one request under one root span."""
    from opentelemetry import trace

    configure("client")
    with trace.get_tracer("test").start_as_current_span("test.request") as span:
        async with AsyncClient(gateway) as client:
            namespace, _ = await _stored(client)
            found: Lookup = await client.lookup(namespace, some_keys(namespace, CHUNKS))
            await fetch_all(client, found)
            await client.release(found)
        print(f"{span.get_span_context().trace_id:032x}")


async def test_a_cluster_killed_whole_starts_again_at_once(tmp_path: Path) -> None:
    """The dead count as members for longer than a start takes, and are not taken for the living."""
    settings = {"QUIRE_ORCHESTRATOR_MEMBER_TTL_MS": "5000"}
    cluster = LocalCluster(tmp_path, arena_bytes=64 << 20, drive_bytes=128 << 20, settings=settings)
    namespace = Namespace("test", "restart", LARGE)
    payload = random_payload(namespace, 4)
    with cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            await store(client, namespace, some_keys(namespace, 4), payload)
        for name in cluster.names:
            cluster.kill(name)
    with cluster:
        async with AsyncClient(cluster.gateway_address) as client:
            keys = some_keys(namespace, 4)

            async def listed() -> bool:
                """Redis may have lost its last second, and nodes tell it again."""
                return (await client.lookup(namespace, keys, lease_ttl_ms=0)).matched_chunks == 4

            await eventually(listed, "the chunks")
            assert ((await fetch_all(client, await client.lookup(namespace, keys)))[0] == payload).all()
