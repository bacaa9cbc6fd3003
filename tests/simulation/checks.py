"""What holds when a day is over: promises are kept, everything comes to rest, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import grpc

from quire.client import AsyncClient
from quire.model.errors import QuireError
from quire.model.fingerprints import fingerprint
from quire.model.index import OBJECT_TIER
from quire.testing.simulation import Process
from quire.testing.simulation.network import unexpected
from quire_gateway.core.s3_errors import S3Error
from quire_storage.core.residency.invariants import under_way
from tests.simulation.prefixes import Prefix

if TYPE_CHECKING:
    from tests.simulation.world import Day

LEASE_MS = 8_000


class Checks:
    """Looks at all parts of a day's cluster at once."""

    def __init__(self, day: Day) -> None:
        self._day = day

    def readable(self, key: bytes, what: str) -> None:
        entry = self._day.cluster.metadata.entries().get(fingerprint(key))
        if entry is None:
            raise self._day.history.fail(f"{what}: the index does not know it", key)
        alive = self._day.cluster.storage
        holders = [name for name in entry.nodes if name in alive and key in alive[name]._tiers.residency]
        if not holders and not (OBJECT_TIER in entry.nodes and self._day.cluster.objects.of(key)):
            raise self._day.history.fail(f"{what}: it is listed for {entry.nodes}, none of them has it", key)

    async def promises(self) -> None:
        listed = self._day.cluster.metadata.entries()
        back = [key for key in self._day.history.evicted if fingerprint(key) in listed]
        if back:
            raise self._day.history.fail("evicted, stored by nobody since, and listed", back[0])
        for key in list(self._day.history.promises):
            self.readable(key, "acknowledged, and lost")
        process = Process("inspector")
        task = process.start(self._inspect(process))
        await task

    async def _inspect(self, process: Process) -> None:
        """A client reads everything that was promised."""
        client = self._day.client_of(process)
        await client.start()
        rng = random.Random(1)
        for prefix in self._day.prefixes:
            lost = (at for at, key in enumerate(prefix.keys) if key not in self._day.history.promises)
            await self._inspect_prefix(client, prefix, next(lost, len(prefix.keys)), rng)
        await self._day.unchained.check(client)
        self._day.history.sessions_end()
        await client.close()

    async def _inspect_prefix(self, client: AsyncClient, prefix: Prefix, expected: int, rng: random.Random) -> None:
        """The first `expected` chunks were promised. What lies behind them may turn out to be missing, once each; and
        a drive may turn out to have failed, once at each node.
        """
        outcome = ""
        for _ in range(len(prefix.keys) - expected + self._day.storage_nodes + 1):
            found = await client.lookup(prefix.namespace, prefix.keys, lease_ttl_ms=0)
            if found.matched_chunks < expected:
                raise self._day.history.fail(
                    "acknowledged, and a look-up misses it", prefix.keys.at(found.matched_chunks)
                )
            outcome = await self._day.fetch(client, prefix, rng, cancel=False)
            if outcome == "done":
                return
            await asyncio.sleep(1.0)
        raise self._day.history.fail(f"what is promised cannot be read: {outcome}", prefix.keys.at(0))

    async def quiet(self) -> None:
        """Everything is healed: wait until nothing is under way, and until nodes and index agree."""
        await asyncio.sleep(LEASE_MS / 1000 + 3.0)
        for _ in range(120):
            await asyncio.sleep(0.5)
            listings = await self._day.cluster.metadata.index.listings()
            agree = all(
                (listings[name].count, listings[name].digest) == node.listed
                if name in listings
                else node.listed[0] == 0
                for name, node in self._day.cluster.storage.items()
            )
            rebuilt = not await self._day.cluster.metadata.index.rebuild() or not self._day.cluster.objects_on
            nodes = self._day.cluster.storage.values()
            uploaded = all(not node._write_behind or not node._write_behind.lag_chunks for node in nodes)
            if agree and rebuilt and uploaded:
                return
        if not rebuilt or not uploaded:
            raise self._day.history.fail(f"the object tier is never settled: rebuilt {rebuilt}, uploaded {uploaded}")
        raise self._day.history.fail(
            f"index and nodes never agree: {listings}, {[node.listed for node in self._day.cluster.storage.values()]}"
        )

    def leaks(self) -> None:
        """No slot, pin, lease, rate, block or transfer is left when all work has ended."""
        for name, node in self._day.cluster.storage.items():
            tiers = node._tiers
            left = under_way(tiers.residency)
            assert not left, f"{name}: {left}"
            arena = tiers.arena
            assert arena.free_blocks == arena._blocks, f"{name}: staging blocks are missing"
            assert not node.requests._transfers._running, f"{name}: transfers are in flight that nobody waits for"
            assert not node._parts.promotions._running, f"{name}: promotions of readers that have gone"
            assert not node.deliveries.running and not node.requests.ingests, (
                f"{name}: transfers are counted that have ended"
            )
        entries = self._day.cluster.metadata.entries()
        hollow = [print_ for print_, entry in entries.items() if not entry.nodes and not entry.extended]
        if hollow:
            keys = [key for prefix in self._day.prefixes for key in prefix.keys if fingerprint(key) in hollow]
            raise self._day.history.fail("an entry that nothing holds or extends pins its parents", keys[0])
        for name, sessions in self._day.cluster.sessions.items():
            assert not sessions._sessions, f"{name}: sessions whose clients have gone"
            assert not sessions._tasks, f"{name}: streams and requests of sessions that have ended"
        metadata = self._day.cluster.metadata
        assert not metadata.dangling(), "parents are kept for children that are not there"
        assert all(ends_ms <= metadata.now_ms for ends_ms in metadata.leases()), "leases that nothing ends"
        scheduler = self._day.cluster.members["scheduler"].service
        scheduler._advance()
        left = [name for link in scheduler._links.values() for name in link.rates]
        assert not left, f"rates are granted to deliveries that have ended: {left}"
        expected = (QuireError, S3Error, grpc.aio.AioRpcError, asyncio.CancelledError, TimeoutError)
        for failure in self._day.loop.failures:
            error = failure.get("exception")
            if isinstance(error, BaseException) and not isinstance(error, expected):
                raise error
        for name, node in self._day.cluster.storage.items():
            assert not node._produced._failures, f"{name}: failures are kept of stores that have ended"
        assert not unexpected, f"a servicer raised {unexpected[0]!r}"
        assert not self._day.cluster.fabric.late, self._day.cluster.fabric.late[0]
