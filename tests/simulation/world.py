"""Bad days: clients at work on a simulated cluster, faults, and a history that is held against what was promised."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.client import AsyncClient
from quire.client.delivery import Delivery
from quire.client.memory.buffers import Buffer
from quire.client.memory.quiescence import unheard_s
from quire.client.store import StoreSession
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability, OnExisting
from quire.model.errors import QuireError
from quire.model.keys import ChunkKeys
from quire.model.urgency import Urgency
from quire.testing.simulation import Process, SimChannels, SimNearestTransport
from quire.testing.simulation.loop import SimulatedLoop
from quire.testing.simulation.network import unexpected
from tests.simulation import requests
from tests.simulation.buckets import BucketLoad
from tests.simulation.checks import LEASE_MS, Checks
from tests.simulation.cluster import GATEWAYS, Cluster
from tests.simulation.contents import UNUSED, check_chunk, check_layer, marked, marks_of
from tests.simulation.faults import Faults
from tests.simulation.history import History
from tests.simulation.observer import listen
from tests.simulation.prefixes import Prefix, bounds, content, prefixes
from tests.simulation.scale import HOT, scale
from tests.simulation.unchained import UnchainedLoad

_OPERATION_S = 60.0
_CLIENT_S = 9.0  # for how long its transfers are permitted
_REST_S = 38.0  # longer than a scheduler remembers, and than buffers are watched
_LATE_LEAKS_S = 1.5
_ABORTED_S = 1.0  # in which nodes that are well give an aborted transfer's memory back
_CANCEL_S = (0.01, 0.01, 0.5)
_UNDISTURBED_S = 3.0  # longer than a store waits for memory
_FINE = ("done", "KeysInvalid", "TargetInvalid")
_KINDS = (
    "retain",
    "prefetch",
    *("store",) * 3,
    *("fetch",) * 4,
    *("follow",) * 2,
    "evict",
    "race",
    "evict and store",
    "cancel fetch",
    "cancel store",
    "garbage",
    "unchained",
)


@dataclass(slots=True)
class Day:
    """One simulated run. `seconds`: of virtual time under load. `faults`: kinds that may happen.

    `reads_only`: everything is stored on drives first, and memory holds next to nothing of it.
    """

    loop: SimulatedLoop
    seconds: float = 20.0
    clients: int = 4
    rate: float = 6.0
    faults: Sequence[str] = ()
    fault_pause_s: tuple[float, float] = (0.5, 2.5)
    storage_nodes: int = 3
    reads_only: bool = False
    history: History = field(default_factory=History)
    cluster: Cluster = field(init=False)
    prefixes: list[Prefix] = field(init=False)
    unchained: UnchainedLoad = field(init=False)
    rng: random.Random = field(init=False)
    disturbed: int = 0
    slow: set[str] = field(default_factory=set)
    digest: Any = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.loop.random.getrandbits(64))
        small: dict[str, float] = {
            "drive_bytes": self.rng.choice([(1 << 20) + 200_000, 3 << 20]),
            "arena_bytes": self.rng.choice([1 << 18, 1 << 20]),
        }
        small |= HOT if self.rng.random() < 0.5 else {}
        if self.reads_only:
            small = {"drive_bytes": 3 << 20, "arena_bytes": 1 << 16}
        self.cluster = Cluster(self.loop, self.storage_nodes, settings=small)
        self.prefixes = prefixes(self.rng)
        self.unchained = UnchainedLoad(self)
        self.cluster.policies.extend([] if self.reads_only else bounds(self.rng, self.prefixes[-1].namespace))
        scale(self.loop)
        hosted = [*(f"client-{number}" for number in range(self.clients)), *self.cluster.storage_names]
        self.cluster.fabric.hosts = {name: f"host-{self.rng.randrange(2)}" for name in hosted}
        unexpected.clear()

    # ---- the run

    async def run(self) -> None:
        await self.cluster.start()
        listen(self)
        if self.reads_only:
            await self._store_all()
        buckets = BucketLoad(self)
        loads = [asyncio.create_task(self._client(number)) for number in range(self.clients)]
        if not self.reads_only:
            loads.append(asyncio.create_task(buckets.run()))
        trouble = Faults(self)
        troubles = asyncio.create_task(trouble.troubles())
        try:
            await asyncio.gather(*loads)
        finally:
            troubles.cancel()
            await asyncio.gather(troubles, return_exceptions=True)
        await asyncio.gather(*trouble.healers)
        self.cluster.policies.clear()
        inspection = Checks(self)
        await inspection.quiet()
        await inspection.promises()
        if not self.reads_only:
            await buckets.check()
        rested_s = self.loop.time() + _REST_S
        while True:
            await asyncio.sleep(0.37)
            try:
                inspection.leaks()
                await asyncio.sleep(_LATE_LEAKS_S)
                return inspection.leaks()
            except AssertionError:
                if self.loop.time() > rested_s:
                    raise

    async def _store_all(self) -> None:
        """Every prefix on a drive, by a client of its own."""
        process = Process("storer")
        await process.start(self._store_each(self.client_of(process)))

    async def _store_each(self, client: AsyncClient) -> None:
        await client.start()
        for prefix in self.prefixes:
            count = len(prefix.keys)
            async with self.buffer(client, prefix, count) as buffer:
                rows = buffer.layers(prefix.layout.num_layers, count, prefix.layout.slice_bytes)
                for at, key in enumerate(prefix.keys):
                    rows[:, at] = content(key, 0, prefix.layout)
                    self.history.sent(key, 0)
                session = await client.store(prefix.namespace, prefix.keys, 0, buffer, durability=Durability.LOCAL)
                for layer in range(prefix.layout.num_layers):
                    session.layer_ready(layer)
                await self.finish(session)
        await client.close()

    def client_of(self, process: Process, timeout_s: float = 20.0) -> AsyncClient:
        channels: Any = SimChannels(self.cluster.network, process)
        transport = SimNearestTransport(self.cluster.fabric, process)
        gateway = (
            f"gateway-{int(process.name.rpartition('-')[2] or 0) % GATEWAYS}" if "-" in process.name else "gateway-0"
        )
        return AsyncClient(gateway, transport=transport, timeout_s=timeout_s, channels=channels)

    def tell(self, text: str, keys: Sequence[bytes] = ()) -> None:
        self.history.tell(self.loop.time(), text, keys)
        self.digest.update(f"{self.loop.time():.6f} {text}".encode())

    # ---- clients

    async def _client(self, number: int) -> None:
        while self.loop.time() < self.seconds:
            process = Process(f"client-{number}")
            task = process.start(self._life(process, number))
            while not task.done() and not process.dead:
                await asyncio.wait([task], timeout=0.5)
            if task.done():
                task.result()

    async def _life(self, process: Process, number: int) -> None:
        client = self.client_of(process, timeout_s=_CLIENT_S)
        rng = random.Random(self.rng.getrandbits(64))
        await client.start()
        crash_s = self.loop.time() + rng.expovariate(1 / 15) if "client" in self.faults else 1e9
        tasks: set[asyncio.Task[None]] = set()
        while self.loop.time() < self.seconds:
            await asyncio.sleep(rng.expovariate(self.rate))
            if self.loop.time() > crash_s:
                self.tell(f"fault: client-{number} crashes")
                self.history.sessions_end()
                process.crash()
                await asyncio.sleep(1)
            many = f"client-{number}" in self.slow and rng.random() < 0.2
            for _ in range(4 if many else 1):
                task = asyncio.create_task(self._operate(client, rng, number, "read at once" if many else ""))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        await self._leave(client)
        self.history.sessions_end()
        await client.close()

    async def _leave(self, client: AsyncClient) -> None:
        """Wait until all memory is back: at most until the permits of unanswered transfers have ended."""
        for _ in range(round(10 * (_CLIENT_S + unheard_s(_CLIENT_S))) + 1):
            if not client._transfers:
                return
            await asyncio.sleep(0.1)
        left = [
            f"{type(each).__name__} quiet at {each._quiescence._quiet}"
            for each in client._transfers.values()
            if each._quiescence
        ]
        raise self.history.fail(f"memory is lent after its permits' end: {left}")

    async def _operate(self, client: AsyncClient, rng: random.Random, number: int, kind: str) -> None:
        kind = kind or ("fetch" if self.reads_only else rng.choice(_KINDS))
        count = len(self.prefixes)
        prefix = self.prefixes[min(rng.randrange(count), rng.randrange(count))]
        began_s = self.loop.time()
        self.history.count(kind)
        try:
            async with asyncio.timeout(_OPERATION_S):
                outcome = await self._one(kind, client, prefix, rng)
        except QuireError as error:
            outcome = type(error).__name__
        except TimeoutError:
            raise self.history.fail(f"{kind} by client-{number} was not answered within its deadline") from None
        took_s = self.loop.time() - began_s
        alone = set(self.faults) == {"slow client"} and f"client-{number}" not in self.slow
        if alone and took_s > _UNDISTURBED_S and not kind.startswith("cancel"):  # memory comes back later
            what = f"{kind} by client-{number} took {took_s:.1f} s"
            raise self.history.fail(f"{what}, with nothing wrong but slow clients")
        broken = set(self.faults) == {"reset"} and not kind.startswith("cancel")
        if broken and outcome not in _FINE and not outcome.startswith(("done", "KeysInvalid")):
            raise self.history.fail(f"{kind} by client-{number}: {outcome}, with nothing wrong but broken connections")
        if not self.disturbed and outcome not in _FINE:
            self.history.count(f"{kind}: {outcome}")
        self.tell(f"client-{number}: {kind}: {outcome} after {took_s:.3f} s", list(prefix.keys))

    async def _one(self, kind: str, client: AsyncClient, prefix: Prefix, rng: random.Random) -> str:
        match kind:
            case "store":
                return await self.store(client, prefix, rng, cancel=False)
            case "cancel store":
                return await self.store(client, prefix, rng, cancel=True)
            case "race":
                stores = [self.store(client, prefix, rng, cancel=False, version=version) for version in (0, 1)]
                return ", ".join(await asyncio.gather(*stores))
            case "evict and store":
                evict = client.evict(prefix.namespace, prefix.keys, keep_chunks=rng.randrange(len(prefix.keys)))
                _, outcome = await asyncio.gather(evict, self.store(client, prefix, rng, cancel=False))
                return outcome
            case "fetch":
                return await self.fetch(client, prefix, rng, cancel=False)
            case "read at once":
                return await self.fetch(client, prefix, rng, cancel=False, order=DeliveryOrder.LAYERWISE)
            case "cancel fetch":
                return await self.fetch(client, prefix, rng, cancel=True)
            case "follow":
                return await requests.follow(self, client, prefix, rng)
            case "unchained":
                return await self.unchained.operate(client, rng)
            case "retain":
                return await requests.retain(self, client, prefix, rng)
            case "prefetch":
                return f"done, {await client.prefetch(prefix.namespace, prefix.keys)} in memory"
            case "evict":
                gone = await client.evict(prefix.namespace, prefix.keys, keep_chunks=rng.randrange(len(prefix.keys)))
                return f"done, {gone} went"
            case _:
                return await requests.garbage(self, client, prefix, rng)

    async def store(
        self,
        client: AsyncClient,
        prefix: Prefix,
        rng: random.Random,
        *,
        cancel: bool,
        version: int | None = None,
        whole: bool = False,
    ) -> str:
        count = len(prefix.keys) if whole else rng.randrange(1, len(prefix.keys) + 1)
        keys = prefix.keys.run(0, count)
        level = rng.choice(list(Durability))
        version = int(rng.random() < 0.1) if version is None else version
        on_existing = OnExisting.VERIFY if rng.random() < 0.2 else OnExisting.SKIP
        began_s, disturbed = self.loop.time(), self.disturbed
        self.history.stores(list(keys), self.loop.time())
        async with self.buffer(client, prefix, count) as buffer:
            rows = buffer.layers(prefix.layout.num_layers, count, prefix.layout.slice_bytes)
            for at, key in enumerate(keys):
                rows[:, at] = content(key, version, prefix.layout)
                self.history.sent(key, version)
            complete = rng.random() < 0.4
            session = await client.store(
                prefix.namespace, keys, 0, buffer, durability=level, on_existing=on_existing, complete=complete
            )
            for layer in range(0 if complete else prefix.layout.num_layers):
                await asyncio.sleep(rng.uniform(0, 0.004))
                session.layer_ready(layer)
            if cancel:
                await asyncio.sleep(rng.uniform(0, 0.02))
                await session.cancel(20.0)
                return "done"
            summary = await self.finish(session)
            codes = [outcome.error_code for outcome in summary.outcomes]
            if on_existing is OnExisting.SKIP and "ContentConflict" in codes:
                raise self.history.fail("what is there was to be skipped, and was refused", keys.at(0))
            self.acknowledge(summary, keys, level, began_s, disturbed)
            return "done"

    def acknowledge(self, summary: Any, keys: ChunkKeys, level: Durability, began_s: float, disturbed: int) -> None:
        """A store of `keys` has ended: what it acknowledged is promised from now on, and readable."""
        kept = [
            keys.at(run.first + index)
            for outcome in summary.outcomes
            for run, marks in marks_of(outcome)
            for index, mark in enumerate(marks)
            if mark
        ]
        promised = [key for key in kept if self.history.acknowledged(key, level, began_s, self.loop.time())]
        if kept:
            self.tell(f"acknowledged at {level.value}", kept)
        if disturbed == self.disturbed:
            for key in promised:
                Checks(self).readable(key, "acknowledged, and not readable at that moment")

    async def finish(self, session: StoreSession) -> Any:
        """Wait for the end of a store. What its nodes have said ahead of the summary must be true."""
        assert session._task is not None
        summary = await asyncio.shield(session._task)
        await session.quiesced(20.0)
        nodes, placed = session._quiescence, session._placed_chunks
        if nodes is not None and await nodes.is_whole(placed) and marked(summary) != placed:
            raise self.history.fail(f"all {placed} chunks are kept, say the nodes, and the summary names others")
        return summary

    async def fetch(
        self,
        client: AsyncClient,
        prefix: Prefix,
        rng: random.Random,
        *,
        cancel: bool,
        order: DeliveryOrder | None = None,
    ) -> str:
        order = order or rng.choice([DeliveryOrder.LAYERWISE, DeliveryOrder.CHUNKWISE])
        window_us, first_us = rng.choice([0, 500, 3000]), rng.choice([0, 2000])
        urgency = Urgency(compute_window_us=window_us, first_layer_us=first_us, priority=rng.randint(-1, 1))
        if rng.random() < 0.5:
            return await self.retrieve(client, prefix, rng, order, urgency, cancel=cancel)
        asked_s, disturbed = self.loop.time(), self.disturbed
        found = await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=LEASE_MS)
        if not found.matched_chunks:
            return "done"
        count = found.matched_chunks
        self.history.leased(found.lease, list(prefix.keys)[:count], asked_s, LEASE_MS / 1000, disturbed)
        async with self.buffer(client, prefix, count) as buffer:
            delivery = await client.fetch(found, buffer, order=order, urgency=urgency)
            try:
                if cancel:
                    await asyncio.sleep(rng.uniform(0, rng.choice(_CANCEL_S)))
                    delivery.abandon()
                    return "done"
                return await self._receive(delivery, buffer, prefix, count, found.take_chunks)
            finally:
                await delivery.quiesced(35.0 if self.faults else _ABORTED_S)
                self.history.unleased(found.lease)
                with contextlib.suppress(QuireError):
                    await client.release(found)

    async def retrieve(
        self,
        client: AsyncClient,
        prefix: Prefix,
        rng: random.Random,
        order: DeliveryOrder,
        urgency: Urgency,
        *,
        cancel: bool,
        follow_s: float = 0.0,
    ) -> str:
        """In one exchange. One that is given up may not know yet which nodes are at it."""
        first, count = rng.randrange(len(prefix.keys)), len(prefix.keys)
        async with self.buffer(client, prefix, count - first) as buffer:
            asked_s, disturbed = self.loop.time(), self.disturbed
            retrieving = asyncio.ensure_future(
                client.retrieve(
                    prefix.namespace,
                    prefix.keys,
                    buffer,
                    first_chunk=first,
                    lease_ttl_ms=LEASE_MS,
                    order=order,
                    urgency=urgency,
                    follow_s=follow_s,
                )
            )
            if cancel:
                await asyncio.wait([retrieving], timeout=rng.uniform(0, rng.choice(_CANCEL_S)))
                if not retrieving.done():
                    retrieving.cancel()
                    await asyncio.wait([retrieving])
                    return "done"
            retrieval = await retrieving
            readable = retrieval.found.matched_chunks - retrieval.found.arriving_chunks
            if retrieval.found.arriving_chunks:
                self.history.count("follow: chunks arrive")
            leased = list(prefix.keys)[:readable]
            self.history.leased(retrieval.found.lease, leased, asked_s, LEASE_MS / 1000, disturbed)
            delivery = retrieval.delivery
            if delivery is None:
                return "done"
            try:
                if cancel:
                    delivery.abandon()
                    return "done"
                delivered = retrieval.found.take_chunks - first
                return await self._receive(delivery, buffer, prefix, count - first, delivered, first, readable)
            finally:
                await delivery.quiesced(35.0 if self.faults else _ABORTED_S)
                self.history.unleased(retrieval.found.lease)
                with contextlib.suppress(QuireError):
                    await client.release(retrieval.found)

    async def _receive(
        self,
        delivery: Delivery,
        buffer: Buffer,
        prefix: Prefix,
        count: int,
        delivered: int,
        first: int = 0,
        readable: int | None = None,
    ) -> str:
        """Follow a delivery of `delivered` chunks into a buffer for `count`, and check each layer and chunk.

        `readable`: how many of the prefix were; the bytes of those behind may be of a store that loses against another.
        """
        began_s = self.loop.time()
        rows = buffer.layers(prefix.layout.num_layers, count, prefix.layout.slice_bytes)
        with contextlib.suppress(QuireError):  # `summary` says it
            for layer in range(prefix.layout.num_layers):
                await delivery.layer(layer)
                check_layer(self.history, layer, rows[layer, :delivered], prefix, first)
        summary = await delivery.summary()
        if await delivery.is_whole(delivered) and marked(summary) != delivered:
            raise self.history.fail(f"all {delivered} chunks have arrived, say the nodes, and the summary names others")
        for outcome in summary.outcomes:
            for run, marks in marks_of(outcome):
                for index, mark in enumerate(marks):
                    key = prefix.keys.at(run.first + index)
                    if mark:
                        version = check_chunk(self.history, key, rows[:, run.first + index - first], prefix.layout)
                        if readable is None or run.first + index < readable:
                            self._check_first(key, version, began_s)
        failed = [outcome.error_code for outcome in summary.outcomes if outcome.error_code]
        return failed[0] if failed else "done"

    def _check_first(self, key: bytes, version: int, began_s: float) -> None:
        if not self.faults and not self.history.read(key, version, began_s, self.loop.time()):
            raise self.history.fail("the bytes under a key are others than before, and it was not evicted", key)

    @contextlib.asynccontextmanager
    async def buffer(self, client: AsyncClient, prefix: Prefix, chunks: int) -> AsyncIterator[Buffer]:
        """Memory of one transfer, looked at once more when it is the caller's again: nothing may be written then."""
        buffer = client.allocate(prefix.layout.payload_bytes(chunks))
        assert buffer.view is not None
        buffer.view[:] = UNUSED
        try:
            yield buffer
        finally:
            if not self.faults:
                await self._returned(buffer)
            if not buffer.is_busy:
                buffer.view[:] = UNUSED
                self.loop.call_later(15.0, self._check_unused, buffer)

    async def _returned(self, buffer: Buffer) -> None:
        """Wait until no transfer uses the buffer: at most `_ABORTED_S` while all nodes are well."""
        until_s = self.loop.time() + _ABORTED_S
        while buffer.is_busy:
            if self.loop.time() > until_s:
                raise self.history.fail("memory stays lent although all nodes are well")
            await asyncio.sleep(0.01)

    def _check_unused(self, buffer: Buffer) -> None:
        if buffer.view is not None and not bool((buffer.view == UNUSED).all()):
            self.loop.failures.append({"exception": self.history.fail("a buffer was written to after it was returned")})
