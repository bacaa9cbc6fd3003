"""What goes wrong on a simulated day, and how it is mended."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.model.durability import Durability
from quire.model.iocb import Op
from quire_storage.core.pool_format import PAGE_BYTES
from tests.integration.engine.disk import Fault, no_fault
from tests.simulation.cluster import ORCHESTRATORS

if TYPE_CHECKING:
    from tests.simulation.world import Day

ALL_FAULTS = (
    "crash",
    "gateway",
    "s3",
    "orchestrator",
    "scheduler",
    "drive",
    "reads",
    "answers",
    "pause",
    "cut",
    "reset",
    "stuck",
    "slow client",
    "slow",
    "redis",
    "redis away",
    "redis emptied",
    "redis rolled back",
    "objects",
    "objects full",
    "clock",
    "client",
    "twin",
)


class Troubles:
    """Strikes at random, of the kinds that the day allows. `healers`: what is still to be mended."""

    def __init__(self, day: Day) -> None:
        self._day = day
        self.healers: list[asyncio.Task[None]] = []
        self._drives_lost = 0

    async def troubles(self) -> None:
        kinds = [kind for kind in self._day.faults if kind != "client"]
        while kinds and self._day.loop.time() < self._day.seconds - 1.0:
            await asyncio.sleep(self._day.rng.uniform(*self._day.fault_pause_s))
            kind = self._day.rng.choice(kinds)
            self._day.history.count(f"fault: {kind}")
            if kind == "slow client":
                self.healers.append(asyncio.create_task(self._slow_client()))
            elif kind == "twin":  # while the one of that name is well: else the second one would be the one
                await asyncio.wait([*self.healers, asyncio.create_task(asyncio.sleep(1.5))])
                await asyncio.sleep(1.5)
                self._day.disturbed += 1
                await self._trouble(kind)
            else:
                self._day.disturbed += 1
                self.healers.append(asyncio.create_task(self._trouble(kind)))

    async def _trouble(self, kind: str) -> None:
        rng, cluster = self._day.rng, self._day.cluster
        nodes = [f"storage-{number}" for number in range(self._day.storage_nodes)]
        orchestrators = [f"orchestrator-{number}" for number in range(ORCHESTRATORS)]
        match kind:
            case "crash":
                await self._crash(rng.choice(nodes))
            case "gateway" | "orchestrator":
                await self._crash(f"{kind}-{rng.randrange(2)}")
            case "scheduler":
                await self._crash(kind)
            case "s3":
                await self._crash(rng.choice(["s3-0", "s3-1"]))
            case "drive":
                await self._lose_drive(rng.choice(nodes))
            case "reads":
                await self._fail_reads(rng.choice(nodes), rng.uniform(0.1, 2.0))
            case "answers":
                await self._lose_answers(rng.choice([*nodes, *orchestrators]), rng.uniform(0.05, 1.5))
            case "pause":
                await self._pause(rng.choice(nodes), rng.uniform(0.2, 3.0))
            case "cut":
                await self._cut(rng.sample([*nodes, "gateway-0", *orchestrators, "client-0", "client-1"], 2))
            case "reset":
                name = rng.choice(["client-0", "client-1", "client-2"])
                self._day.tell(f"fault: connections of {name} break")
                for _ in range(rng.choice([1, 1, 4])):
                    cluster.network.reset(name)
                    await asyncio.sleep(rng.uniform(0.0, 0.3))
            case "stuck":
                peer = rng.choice([*nodes, "client-0", "client-1", "client-2"])
                pair = frozenset((peer, rng.choice([name for name in nodes if name != peer])))
                self._day.tell(f"fault: stuck {sorted(pair)}")
                cluster.network.stuck.add(pair)
                await asyncio.sleep(rng.uniform(7.5, 11.0))
                cluster.network.stuck.discard(pair)
            case "slow":
                name = rng.choice([*nodes, "gateway-0", "client-0"])
                cluster.network.slow[name] = rng.uniform(0.01, 0.2)
                await asyncio.sleep(rng.uniform(0.5, 3.0))
                cluster.network.slow.pop(name, None)
            case "redis":
                await self._silence(rng.random() < 0.4)
            case "redis away":
                self._day.tell("fault: Redis is away for longer than any lease")
                cluster.metadata.down, cluster.metadata.hears = True, False
                await asyncio.sleep(rng.uniform(9.0, 13.0))
                cluster.metadata.down = False
            case "redis emptied":
                self._day.tell("fault: Redis is emptied")
                cluster.metadata.empty()
            case "redis rolled back":
                replica = cluster.metadata.snapshot()
                await asyncio.sleep(rng.uniform(0.3, 2.0))
                self._day.tell("fault: Redis loses its last seconds")
                cluster.metadata.restore(replica)
            case "objects":
                self._day.tell("fault: the object tier fails")
                cluster.objects.failing = True
                await asyncio.sleep(rng.uniform(0.2, 3.0))
                cluster.objects.failing = False
            case "objects full":
                cluster.objects.full = True
                await asyncio.sleep(rng.uniform(0.2, 3.0))
                cluster.objects.full = False
            case "twin":
                self._day.tell("fault: a second storage-0")
                twin = await cluster.twin("storage-0")
                await asyncio.sleep(rng.uniform(1.0, 4.0))
                twin.crash()
            case "clock":
                member = cluster.members[rng.choice([*nodes, *orchestrators, "gateway-0", "s3-0"])]
                member.process.skew_ms = rng.randrange(-2000, 2000)
        self._day.disturbed += 1

    async def _silence(self, hears: bool) -> None:
        """Redis answers nothing for a while; or it does what it is asked, and now and then its answers are lost."""
        metadata, rng = self._day.cluster.metadata, self._day.rng
        self._day.tell(f"fault: Redis does not answer{', and hears' if hears else ''}")
        for _ in range(10 if hears else 1):
            metadata.down, metadata.hears = True, hears
            await asyncio.sleep(rng.uniform(0.005, 0.1) if hears else rng.uniform(0.2, 2.0))
            metadata.down = False
            await asyncio.sleep(rng.uniform(0.02, 0.2))

    async def _slow_client(self) -> None:
        """Nothing reaches its memory, or comes from there: that costs its own requests only."""
        name = f"client-{self._day.rng.randrange(self._day.clients)}"
        self._day.tell(f"fault: {name} is slow")
        self._day.slow.add(name)
        pairs = {frozenset((name, f"storage-{number}")) for number in range(self._day.storage_nodes)}
        self._day.cluster.network.stuck |= pairs
        await asyncio.sleep(self._day.rng.uniform(2.0, 5.0))
        self._day.cluster.network.stuck -= pairs

    async def _crash(self, name: str) -> None:
        member = self._day.cluster.members[name]
        if member.process.dead:
            return
        self._day.tell(f"fault: {name} crashes")
        if name.startswith("storage"):
            self._day.history.void(Durability.MEMORY)
        self._day.cluster.crash(name)
        if member.disk is not None and self._day.rng.random() < 0.3:
            drive = member.disk.files[self._day.rng.choice("ab")]
            at = self._day.rng.randrange(2) * PAGE_BYTES + self._day.rng.randrange(256)
            self._day.tell(f"fault: byte {at} of a pool of {name} rots")
            for content in drive.now, drive.durable:
                content[at] ^= 1 << self._day.rng.randrange(8)
        await asyncio.sleep(self._day.rng.uniform(0.1, 3.0))
        await self._day.cluster.restart(name)
        self._day.tell(f"{name} is back")

    async def _lose_drive(self, name: str) -> None:
        """One of a node's two drives fails for good; after the node's next start there is a new one in its place."""
        member = self._day.cluster.members[name]
        assert member.disk is not None
        if member.process.dead or member.disk.fault is not no_fault:
            return
        self._day.tell(f"fault: a drive of {name} fails")
        member.disk.fault = lambda op, file, offset, length: -errno.EIO if file == 0 else None
        lost = [Durability.MEMORY, Durability.LOCAL] + [Durability.REPLICATED] * (self._drives_lost > 0)
        self._drives_lost += 1
        for _ in range(2):  # again for what was being acknowledged then
            for level in lost:
                self._day.history.void(level)
            await asyncio.sleep(2.0)

    async def _cut(self, names: Sequence[str]) -> None:
        pair, rng = frozenset(names), self._day.rng
        self._day.tell(f"fault: cut {sorted(pair)}")
        self._day.cluster.network.cuts.add(pair)
        await asyncio.sleep(rng.uniform(0.3, 3.0) if rng.random() < 0.7 else rng.uniform(3.0, 12.0))
        self._day.cluster.network.cuts.discard(pair)

    async def _fail_reads(self, name: str, seconds: float) -> None:
        """The path to a drive is down for a moment: what lies there is sound, and costs no promise."""
        disk = self._day.cluster.members[name].disk
        assert disk is not None
        if disk.fault is not no_fault:
            return
        self._day.tell(f"fault: a drive of {name} fails reads for {seconds:.1f} s")
        file = self._day.rng.randrange(2)
        fails: Fault = lambda op, at, offset, length: -errno.EIO if op is Op.READ and at == file else None  # noqa: E731
        disk.fault = fails
        await asyncio.sleep(seconds)
        if disk.fault is fails:
            disk.fault = no_fault

    async def _lose_answers(self, name: str, seconds: float) -> None:
        """What is asked of a process is done, and its answers are lost."""
        unanswered = self._day.cluster.network.unanswered
        if name in unanswered:
            return
        self._day.tell(f"fault: answers of {name} are lost for {seconds:.1f} s")
        unanswered.add(name)
        await asyncio.sleep(seconds)
        unanswered.discard(name)

    async def _pause(self, name: str, seconds: float) -> None:
        process = self._day.cluster.members[name].process
        if process.dead or process.paused:
            return
        self._day.tell(f"fault: {name} stands still for {seconds:.1f} s")
        process.paused = True
        await asyncio.sleep(seconds)
        process.go_on()
