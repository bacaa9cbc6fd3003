"""What goes wrong on a simulated day, and how it is mended."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from quire.model.durability import Durability
from quire.model.iocb import Op
from quire.testing.simulation import SimSharedPeer
from quire_storage.core.pool.format import PAGE_BYTES
from tests.integration.engine.disk import Fault, no_fault
from tests.simulation.cluster import GATEWAYS, ORCHESTRATORS, S3_FRONTENDS
from tests.simulation.prefixes import content

if TYPE_CHECKING:
    from tests.simulation.world import Day

_SKEW_MS: Final = 300_000


class Faults:
    """Strikes at random, of the kinds that the day allows. `healers`: what is still to be mended."""

    def __init__(self, day: Day) -> None:
        self._day = day
        self.healers: list[asyncio.Task[None]] = []
        self._copies_lost = 0
        self._rotten: set[bytes] = set()
        self._nodes = day.cluster.storage_names
        self._orchestrators = [f"orchestrator-{number}" for number in range(ORCHESTRATORS)]
        self._gateways = [f"gateway-{number}" for number in range(GATEWAYS)]

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
                await self._strike(kind)
            else:
                self.healers.append(asyncio.create_task(self._strike(kind)))

    async def _strike(self, kind: str) -> None:
        self._day.disturbed += 1
        await _STRIKES[kind](self)
        self._day.disturbed += 1

    # ---- processes

    async def _crash_node(self) -> None:
        await self._crash(self._day.rng.choice(self._nodes))

    async def _crash_gateway(self) -> None:
        await self._crash(self._day.rng.choice(self._gateways))

    async def _crash_orchestrator(self) -> None:
        await self._crash(self._day.rng.choice(self._orchestrators))

    async def _crash_scheduler(self) -> None:
        await self._crash("scheduler")

    async def _crash_s3(self) -> None:
        await self._crash(f"s3-{self._day.rng.randrange(S3_FRONTENDS)}")

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
            for bytes_ in drive.now, drive.durable:
                bytes_[at] ^= 1 << self._day.rng.randrange(8)
        await self._start_again(name)

    async def _start_again(self, name: str) -> None:
        await asyncio.sleep(self._day.rng.uniform(0.1, 3.0))
        await self._day.cluster.restart(name)
        self._day.tell(f"{name} is back")

    async def _upgrade(self) -> None:
        """Restart each member, one after the other, in the order of `docs/operations/upgrade.md`."""
        self._day.tell("fault: a rolling upgrade")
        for name in self._orchestrators:
            await self._crash(name)
        for name in self._nodes:
            await self._stop(name)
        for name in self._gateways:
            await self._crash(name)

    async def _stop_node(self) -> None:
        await self._stop(self._day.rng.choice(self._nodes))

    async def _stop(self, name: str) -> None:
        """Stop a node as an upgrade does, and start it again."""
        if self._day.cluster.members[name].process.dead or self._day.cluster.members[name].process.paused:
            return
        self._day.tell(f"fault: {name} is stopped")
        self._day.history.void(Durability.MEMORY)
        stopped = await self._day.cluster.stop(name)
        self._day.history.void(Durability.MEMORY)
        if stopped:
            await self._start_again(name)

    async def _lose_node(self) -> None:
        """Lose a node with its drives for good. A new node takes its name."""
        name = self._day.rng.choice(self._nodes)
        member = self._day.cluster.members[name]
        if member.process.dead:
            return
        assert member.disk is not None
        self._day.tell(f"fault: {name} is lost for good")
        self._day.cluster.crash(name)
        member.disk.files.clear()
        self._lose_copies()
        await self._start_again(name)
        self._void_lost()

    async def _pause_node(self) -> None:
        await self._pause(self._day.rng.choice(self._nodes), self._day.rng.uniform(0.2, 3.0))

    async def _pause(self, name: str, seconds: float) -> None:
        process = self._day.cluster.members[name].process
        if process.dead or process.paused:
            return
        self._day.tell(f"fault: {name} stands still for {seconds:.1f} s")
        process.paused = True
        await asyncio.sleep(seconds)
        process.go_on()

    async def _second_of_a_name(self) -> None:
        self._day.tell("fault: a second storage-0")
        twin = await self._day.cluster.twin("storage-0")
        await asyncio.sleep(self._day.rng.uniform(1.0, 4.0))
        twin.crash()

    async def _wrong_clock(self) -> None:
        rng = self._day.rng
        name = rng.choice([*self._nodes, *self._orchestrators, *self._gateways, "s3-0"])
        most_ms = 2000 if name == "s3-0" else _SKEW_MS  # the frontend has no heartbeat here
        self._day.cluster.members[name].process.skew_ms = rng.randrange(-most_ms, most_ms)

    # ---- drives

    async def _lose_drive(self) -> None:
        """One of a node's two drives fails for good; after the node's next start there is a new one in its place."""
        name = self._day.rng.choice(self._nodes)
        member = self._day.cluster.members[name]
        assert member.disk is not None
        if member.process.dead or member.disk.fault is not no_fault:
            return
        self._day.tell(f"fault: a drive of {name} fails")
        member.disk.fault = lambda op, file, offset, length: -errno.EIO if file == 0 else None
        self._day.cluster.failed_drives.add(name)
        self._lose_copies()
        await asyncio.sleep(2.0)
        self._void_lost()  # what was being acknowledged then

    def _lose_copies(self) -> None:
        self._copies_lost += 1
        self._void_lost()

    def _void_lost(self) -> None:
        """Void the promises that lost copies end: of `replicated` chunks from the second loss on, or if they rotted."""
        for level in (Durability.MEMORY, Durability.LOCAL):
            self._day.history.void(level)
        if self._copies_lost > 1:
            self._day.history.void(Durability.REPLICATED)
        for key in self._rotten:
            self._day.history.void_chunk(key, (Durability.REPLICATED,))

    async def _fail_reads(self) -> None:
        """The path to a drive is down for a moment: what lies there is sound, and costs no promise."""
        seconds = self._day.rng.uniform(0.1, 2.0)
        await self._fail_for_a_while(
            f"fails reads for {seconds:.1f} s", lambda op: -errno.EIO if op is Op.READ else None, seconds
        )

    async def _fail_writes(self) -> None:
        """A drive takes nothing for a moment, as one that was mounted anew read-only."""
        seconds = self._day.rng.uniform(0.1, 2.0)
        await self._fail_for_a_while(
            f"is read-only for {seconds:.1f} s", lambda op: -errno.EROFS if op is Op.WRITE else None, seconds
        )

    async def _fail_for_a_while(self, effect: str, outcome: Callable[[Op], int | None], seconds: float) -> None:
        name, file = self._day.rng.choice(self._nodes), self._day.rng.randrange(2)
        disk = self._day.cluster.members[name].disk
        assert disk is not None
        if disk.fault is not no_fault:
            return
        self._day.tell(f"fault: a drive of {name} {effect}")
        fails: Fault = lambda op, at, offset, length: outcome(op) if at == file else None  # noqa: E731
        disk.fault = fails
        await asyncio.sleep(seconds)
        if disk.fault is fails:
            disk.fault = no_fault

    async def _rot(self) -> None:
        """A byte of a chunk on a drive changes: that copy is lost, and no other."""
        name = self._day.rng.choice(self._nodes)
        member, rng = self._day.cluster.members[name], self._day.rng
        if member.process.dead or member.service is None or member.disk is None:
            return
        pool = member.service._tiers.pool.map
        prefix = rng.choice(self._day.prefixes)
        key = prefix.keys.at(rng.randrange(len(prefix.keys)))
        placed = pool.get(key)
        if placed is None:
            return
        layer = rng.randrange(prefix.layout.num_layers)
        at = pool.data_offset(placed.place.drive) + placed.place.offset + layer * placed.place.layer_stride
        file = member.disk._open[placed.place.drive] if placed.place.drive < len(member.disk._open) else None
        slice_ = bytes(file.now[at : at + prefix.layout.slice_bytes]) if file is not None else b""
        if not any(slice_ == content(key, version, prefix.layout)[layer].tobytes() for version in (0, 1)):
            return  # it lies elsewhere by now
        assert file is not None
        self._day.tell(f"fault: a chunk on a drive of {name} rots", [key])
        file.sync()
        for bytes_ in file.now, file.durable:
            bytes_[at + rng.randrange(prefix.layout.slice_bytes)] ^= 1 << rng.randrange(8)
        ended_levels = [Durability.MEMORY, Durability.LOCAL]
        if key in self._rotten or self._copies_lost:
            ended_levels.append(Durability.REPLICATED)
        self._rotten.add(key)
        self._day.history.void_chunk(key, ended_levels)

    async def _misdirect(self) -> None:
        """Misdirect a write: its place keeps the old content, and another place of the drive is overwritten."""
        name = self._day.rng.choice(self._nodes)
        disk = self._day.cluster.members[name].disk
        assert disk is not None
        if disk.fault is not no_fault or disk.redirect is not None:
            return

        def elsewhere(file: int, offset: int, length: int, size: int) -> int:
            where = self._day.rng.randrange(2, (size - length) // PAGE_BYTES) * PAGE_BYTES
            self._day.tell(f"fault: a write of {name} to {offset} of drive {file} lands at {where}")
            self._lose_copies()
            return where

        disk.redirect = elsewhere
        await asyncio.sleep(2.0)
        disk.redirect = None
        self._void_lost()

    # ---- network

    async def _lose_answers(self) -> None:
        """What is asked of a process is done, and its answers are lost."""
        name, seconds = self._day.rng.choice([*self._nodes, *self._orchestrators]), self._day.rng.uniform(0.05, 1.5)
        unanswered = self._day.cluster.network.unanswered
        if name in unanswered:
            return
        self._day.tell(f"fault: answers of {name} are lost for {seconds:.1f} s")
        unanswered.add(name)
        await asyncio.sleep(seconds)
        unanswered.discard(name)

    async def _cut(self) -> None:
        rng, network = self._day.rng, self._day.cluster.network
        names = [*self._nodes, *self._gateways, *self._orchestrators, "client-0", "client-1"]
        pair = frozenset(rng.sample(names, 2))
        self._day.tell(f"fault: cut {sorted(pair)}")
        network.cuts.add(pair)
        await asyncio.sleep(rng.uniform(0.3, 3.0) if rng.random() < 0.7 else rng.uniform(3.0, 12.0))
        network.cuts.discard(pair)

    async def _reset(self) -> None:
        name = self._day.rng.choice(["client-0", "client-1", "client-2"])
        self._day.tell(f"fault: connections of {name} break")
        for _ in range(self._day.rng.choice([1, 1, 4])):
            self._day.cluster.network.reset(name)
            await asyncio.sleep(self._day.rng.uniform(0.0, 0.3))

    async def _stick(self) -> None:
        """Hold posted data back, and land it later, even after its connection was closed."""
        rng, network = self._day.rng, self._day.cluster.network
        peer = rng.choice([*self._nodes, "client-0", "client-1", "client-2"])
        pair = frozenset((peer, rng.choice([name for name in self._nodes if name != peer])))
        self._day.tell(f"fault: stuck {sorted(pair)}")
        network.stuck.add(pair)
        await asyncio.sleep(rng.uniform(7.5, 11.0))
        network.stuck.discard(pair)

    async def _noise(self) -> None:
        """Change a byte of each transfer between two nodes."""
        rng, network = self._day.rng, self._day.cluster.network
        pair = frozenset(rng.sample(self._nodes, 2))
        self._day.tell(f"fault: noise between {sorted(pair)}")
        network.noisy.add(pair)
        await asyncio.sleep(rng.uniform(1.0, 4.0))
        network.noisy.discard(pair)

    async def _bar(self) -> None:
        """Break the connection between a node and a client or another node; for a while no new one can be opened."""
        rng, cluster = self._day.rng, self._day.cluster
        node = rng.choice(self._nodes)
        others = [f"client-{number}" for number in range(self._day.clients)]
        other = rng.choice([*others, *(name for name in self._nodes if name != node)])
        pair = frozenset((node, other))
        self._day.tell(f"fault: no connection between {node} and {other}")
        cluster.network.unreachable.add(pair)
        for member in list(cluster.fabric.members.values()):
            for peer in [each for peers in member.peers.values() for each in peers]:
                if peer.between == pair and not isinstance(peer, SimSharedPeer):
                    peer.abort()
        await asyncio.sleep(rng.uniform(0.5, 4.0))
        cluster.network.unreachable.discard(pair)

    async def _slow_down(self) -> None:
        rng, network = self._day.rng, self._day.cluster.network
        name = rng.choice([*self._nodes, *self._gateways, "client-0"])
        network.slow[name] = rng.uniform(0.01, 0.2)
        await asyncio.sleep(rng.uniform(0.5, 3.0))
        network.slow.pop(name, None)

    async def _delay_threads(self) -> None:
        """A node has no processor to spare for the threads that copy to and from clients on its host."""
        rng, slow = self._day.rng, self._day.cluster.network.slow_threads
        name = rng.choice(self._nodes)
        slow[name] = rng.uniform(0.01, 1.0)
        self._day.tell(f"fault: threads of {name} are up to {slow[name]:.2f} s late")
        await asyncio.sleep(rng.uniform(0.3, 3.0))
        slow.pop(name, None)

    async def _slow_client(self) -> None:
        """Nothing reaches its memory, or comes from there: that costs its own requests only."""
        name = f"client-{self._day.rng.randrange(self._day.clients)}"
        self._day.tell(f"fault: {name} is slow")
        self._day.slow.add(name)
        pairs = {frozenset((name, node)) for node in self._nodes}
        self._day.cluster.network.stuck |= pairs
        await asyncio.sleep(self._day.rng.uniform(2.0, 5.0))
        self._day.cluster.network.stuck -= pairs

    # ---- Redis and the object tier

    async def _silence(self) -> None:
        """Silence Redis for a while, or lose some of its responses although it executes the commands."""
        metadata, rng = self._day.cluster.metadata, self._day.rng
        executes = rng.random() < 0.4
        self._day.tell(f"fault: Redis does not answer{', and executes' if executes else ''}")
        for _ in range(10 if executes else 1):
            metadata.down, metadata.executes = True, executes
            await asyncio.sleep(rng.uniform(0.005, 0.1) if executes else rng.uniform(0.2, 2.0))
            metadata.down = False
            await asyncio.sleep(rng.uniform(0.02, 0.2))

    async def _silence_long(self) -> None:
        metadata = self._day.cluster.metadata
        self._day.tell("fault: Redis is away for longer than any lease")
        metadata.down, metadata.executes = True, False
        await asyncio.sleep(self._day.rng.uniform(9.0, 13.0))
        metadata.down = False

    async def _empty(self) -> None:
        self._day.tell("fault: Redis is emptied")
        self._day.cluster.metadata.empty()
        self._day.history.index_lost(self._day.loop.time())

    async def _roll_back(self) -> None:
        """Fail over to a replica that misses the last seconds."""
        await self._restore(self._day.rng.uniform(0.3, 2.0), "loses its last seconds")

    async def _restore_backup(self) -> None:
        await self._restore(self._day.rng.uniform(3.0, 9.0), "is restored from a backup")

    async def _restore(self, age_s: float, effect: str) -> None:
        metadata = self._day.cluster.metadata
        backup = metadata.snapshot()
        await asyncio.sleep(age_s)
        self._day.tell(f"fault: Redis {effect}")
        metadata.restore(backup)
        self._day.history.index_lost(self._day.loop.time())

    async def _fail_objects(self) -> None:
        self._day.tell("fault: the object tier fails")
        self._day.cluster.objects.failing = True
        await asyncio.sleep(self._day.rng.uniform(0.2, 3.0))
        self._day.cluster.objects.failing = False

    async def _fill_objects(self) -> None:
        self._day.cluster.objects.full = True
        await asyncio.sleep(self._day.rng.uniform(0.2, 3.0))
        self._day.cluster.objects.full = False

    async def _delay_objects(self) -> None:
        self._day.tell("fault: requests to the object tier are repeated late")
        self._day.cluster.objects.late_s = _LATE_S
        await asyncio.sleep(self._day.rng.uniform(2.0, 6.0))
        self._day.cluster.objects.late_s = 0.0


_LATE_S: Final = 4.0
"""After the time of grace: late requests meet objects of later index entries."""

_STRIKES: Final[dict[str, Callable[[Faults], Coroutine[Any, Any, None]]]] = {
    "crash": Faults._crash_node,
    "stop": Faults._stop_node,
    "upgrade": Faults._upgrade,
    "loss": Faults._lose_node,
    "gateway": Faults._crash_gateway,
    "s3": Faults._crash_s3,
    "orchestrator": Faults._crash_orchestrator,
    "scheduler": Faults._crash_scheduler,
    "drive": Faults._lose_drive,
    "reads": Faults._fail_reads,
    "writes": Faults._fail_writes,
    "rot": Faults._rot,
    "misdirected": Faults._misdirect,
    "answers": Faults._lose_answers,
    "pause": Faults._pause_node,
    "cut": Faults._cut,
    "reset": Faults._reset,
    "stuck": Faults._stick,
    "noise": Faults._noise,
    "unreachable": Faults._bar,
    "slow": Faults._slow_down,
    "threads": Faults._delay_threads,
    "redis": Faults._silence,
    "redis away": Faults._silence_long,
    "redis emptied": Faults._empty,
    "redis rolled back": Faults._roll_back,
    "redis restored": Faults._restore_backup,
    "objects": Faults._fail_objects,
    "objects full": Faults._fill_objects,
    "objects late": Faults._delay_objects,
    "clock": Faults._wrong_clock,
    "twin": Faults._second_of_a_name,
}

ALL_FAULTS: Final[Sequence[str]] = (*_STRIKES, "slow client", "client")
