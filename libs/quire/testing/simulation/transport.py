"""The data plane between simulated processes.

Bytes move when a transfer ends; a write that was posted may still land when its writer is dead, or has lost its
patience, for as long as the connection stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.model.descriptor import RdmaTarget
from quire.model.errors import DeadlineExceeded, PeerLost, TargetInvalid
from quire.testing.simulation.loop import Process
from quire.testing.simulation.network import Network
from quire.transport.base import PayloadStream, Peer, Region, Remote

Bytes = npt.NDArray[np.uint8]
_BYTES_PER_S: Final = 2e9


class SimRegion:
    """Registered memory of one process."""

    def __init__(self, fabric: Fabric, process: Process, buffer: Any) -> None:
        self.view: Bytes = np.asarray(buffer).reshape(-1).view(np.uint8)
        self.process = process
        self.length = self.view.nbytes
        self.closed = False
        number = next(fabric.numbers)
        self.address = number << 32
        self.remote_key = b"%d" % number
        self._fabric = fabric
        fabric.regions[self.remote_key] = self

    def close(self) -> None:
        self.closed = True
        self._fabric.regions.pop(self.remote_key, None)


@dataclass(slots=True)
class Fabric:
    """A cluster's members and the members' memory.

    `hosts`: host names by process name; the processes of a host share memory. `late`: writes that landed in memory
    which was unregistered.
    """

    network: Network
    members: dict[bytes, SimTransport] = field(default_factory=dict)
    regions: dict[bytes, SimRegion] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    late: list[str] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)

    def share_memory(self, *processes: Process) -> bool:
        """Return whether the processes run on one host."""
        return len({self.hosts.get(process.name, process.name) for process in processes}) == 1


class SimRemote:
    """A window of a peer's region."""

    def __init__(self, region: SimRegion, target: RdmaTarget) -> None:
        start = target.address - region.address
        if start < 0 or start + target.length > region.length:
            raise TargetInvalid("outside of the registered range", field="target")
        self.region = region
        self._start = start
        self.length = target.length

    def window(self, offset: int, length: int) -> Bytes:
        """Bytes of it. Raises `TargetInvalid`."""
        if offset < 0 or offset + length > self.length:
            raise TargetInvalid(f"[{offset}, {offset + length}) is outside of {self.length} bytes", field="target")
        return self.region.view[self._start + offset : self._start + offset + length]

    def close(self) -> None:
        return


class SimTransport:
    """A member of the fabric."""

    name = "simulated"
    proof = b""

    def __init__(self, fabric: Fabric, process: Process) -> None:
        self.fabric = fabric
        self.process = process
        self.handler: Callable[[bytes], None] = lambda message: None
        self._address = b"sim://%d" % next(fabric.numbers)
        self._peers: dict[bytes, SimPeer] = {}
        self.peers: defaultdict[bytes, list[SimPeer]] = defaultdict(list)
        self.closed = False

    @property
    def description(self) -> str:
        return "simulated"

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def alive(self) -> bool:
        return not self.closed and not self.process.dead

    async def start(self) -> None:
        self.fabric.members[self._address] = self

    async def close(self) -> None:
        self.closed = True
        self.process.wake()

    def allocate(self, length: int) -> Bytes:
        return np.zeros(length, dtype=np.uint8)

    def register(self, buffer: Any) -> Region:
        return SimRegion(self.fabric, self.process, buffer)

    def connect(self, address: bytes) -> Peer:
        peer = self._peers.get(address)
        if peer is None or peer.error is not None:
            member = self.fabric.members.get(address)
            if member is None or not member.alive:
                raise PeerLost("no such peer")
            peer = self._peers[address] = self._connected(member)
            self.peers[address].append(peer)
        return peer

    def _connected(self, peer: SimTransport) -> SimPeer:
        if frozenset((self.process.name, peer.process.name)) in self.fabric.network.unreachable:
            raise PeerLost("no route to the peer")
        return SimPeer(self, peer)

    def sends_to(self, other: SimTransport) -> bool:
        """Whether something is on its way there, by any connection that there was, and not cut off."""
        flying = any(peer.flying for peer in self.peers[other.address])
        return flying and self.fabric.network.reaches(self.process, other.process)

    def on_message(self, handler: Callable[[bytes], None]) -> None:
        self.handler = handler

    def expecting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class SimPeer:
    """A connection. Messages arrive in order, puts in any; a peer that dies is noticed after a moment."""

    def __init__(self, sender: SimTransport, receiver: SimTransport) -> None:
        self.mine = sender
        self.other = receiver
        self._error: PeerLost | None = None
        self._watchers: list[Callable[[PeerLost], None]] = []
        self._sent_s = self._message_s = 0.0
        self.flying = 0
        self.torn = False
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while self.other.alive and self._error is None:
            await self.other.process.changed()
        while self.other.sends_to(self.mine):  # the end of a connection comes behind what was sent on it
            await asyncio.sleep(0.05)
        for back in self.other.peers[self.mine.address]:
            back.torn = True
        self._fail(PeerLost("the peer died"))

    def _fail(self, error: PeerLost) -> None:
        if self._error is None:
            self._error = error
            watchers, self._watchers = self._watchers, []
            for watcher in watchers:
                watcher(error)

    @property
    def error(self) -> PeerLost | None:
        return self._error

    @property
    def reached(self) -> bool:
        return True

    def on_failure(self, callback: Callable[[PeerLost], None]) -> Callable[[], None]:
        if self._error is not None:
            callback(self._error)
            return lambda: None
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback) if callback in self._watchers else None

    def memory(self, remote: Remote) -> Bytes | None:
        """Return None: the memory is on another host."""
        return None

    async def remote(self, target: RdmaTarget) -> Remote:
        region = self.mine.fabric.regions.get(target.remote_key)
        if region is None:
            raise TargetInvalid("unknown key", field="target.remote_key")
        return SimRemote(region, target)

    def arrival_s(self, size: int, *, message: bool = False) -> float:
        """Return when bytes that are sent now arrive (loop time).

        Messages arrive in order. Puts and gets arrive in any order: they overtake each other, and messages overtake
        them. All share the link's bandwidth.
        """
        network = self.mine.fabric.network
        loop = network.loop
        extra = sum(network.slow.get(side.process.name, 0.0) for side in (self.mine, self.other))
        latency_s = loop.random.uniform(*network.latency_s) / 4 + extra
        self._sent_s = max(self._sent_s, loop.time()) + size / _BYTES_PER_S
        if not message:
            return self._sent_s + latency_s
        self._message_s = max(self._message_s, self._sent_s + latency_s)
        return self._message_s

    async def get(
        self, region: Region, offset: int, length: int, remote: Remote, remote_offset: int, *, timeout_s: float
    ) -> None:
        assert isinstance(remote, SimRemote) and isinstance(region, SimRegion)
        source = remote.window(remote_offset, length)
        target = local(region, offset, length)
        done = self.post(length, lambda: target.__setitem__(slice(None), source))
        try:
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            raise DeadlineExceeded("the peer does not answer") from None

    def post(self, size: int, move: Callable[[], None], *, message: bool = False) -> asyncio.Future[None]:
        """Move bytes when they arrive; the future fails if the connection goes before that.

        The network does it: the writer's process may be dead or paused by then.
        """
        loop = self.mine.fabric.network.loop
        done: asyncio.Future[None] = loop.create_future()
        at_s = self.arrival_s(size, message=message)
        self.flying += 1

        def arrive() -> None:
            if self.torn or not self.other.alive:
                self.flying -= 1
                if not done.done():
                    done.set_exception(PeerLost("the connection broke"))
                    done.exception()
            elif self.is_held():
                loop.call_later(0.2, arrive, context=_of_the_network())
            else:
                self.flying -= 1
                move()
                if not done.done():
                    done.set_result(None)

        loop.call_at(at_s, arrive, context=_of_the_network())
        return done

    @property
    def between(self) -> frozenset[str]:
        """The names of both processes."""
        return frozenset((self.mine.process.name, self.other.process.name))

    def is_held(self) -> bool:
        """Whether data that is in flight arrives only later."""
        network = self.mine.fabric.network
        return self._is_stuck() or not network.reaches(self.mine.process, self.other.process)

    def _is_stuck(self) -> bool:
        return self.between in self.mine.fabric.network.stuck

    def stream(self, region: Region, remote: Remote, tenant: str = "") -> PayloadStream:
        assert isinstance(remote, SimRemote) and isinstance(region, SimRegion)
        return SimStreamOfPuts(self, region, remote)

    def send(self, message: bytes) -> None:
        if self._error is not None:
            raise self._error
        receiver = self.other
        self.post(len(message), lambda: _hand_over(receiver, message), message=True)

    async def flush(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def settle(self, timeout_s: float) -> None:
        if self.torn or (self._error is not None and not self.other.alive):
            return
        raise DeadlineExceeded("transfers are in flight")

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Tear the connection down: puts that have not landed by now never land, unless the link is stuck."""
        self.torn = not self._is_stuck()
        self._fail(PeerLost("the connection was aborted"))


class SimStreamOfPuts:
    """Puts, which land in any order; an announcement arrives after all puts that were sent before it."""

    def __init__(self, peer: SimPeer, region: SimRegion, remote: SimRemote) -> None:
        self._peer = peer
        self._region = region
        self._remote = remote
        self._stopped = False
        self._flying: list[asyncio.Future[None]] = []
        self.bytes_posted = 0

    async def send(self, offset: int, length: int, remote_offset: int) -> None:
        await self.gather(np.array([offset], dtype=np.int64), length, remote_offset)

    async def gather(self, offsets: npt.NDArray[np.int64], length: int, remote_offset: int) -> None:
        if self._stopped:
            raise PeerLost("the stream was stopped")
        if self._peer.error is not None:
            raise self._peer.error
        window = self._remote.window(remote_offset, length * len(offsets))
        sources = [local(self._region, offset, length) for offset in offsets.tolist()]
        fabric, target = self._peer.mine.fabric, self._remote.region

        def move() -> None:
            if target.closed:
                fabric.late.append(f"a write from {self._peer.mine.process.name} landed in unregistered memory")
            for index, source in enumerate(sources):
                window[index * length : (index + 1) * length] = source
            if self._peer.between in fabric.network.noisy:
                window[fabric.network.loop.random.randrange(len(window))] ^= 1

        self._flying.append(self._peer.post(window.nbytes, move))
        self.bytes_posted += window.nbytes
        await asyncio.sleep(0)

    async def place(self, write: Callable[[], None], length: int) -> None:
        raise NotImplementedError("the memory is on another host")

    def announce(self, message: bytes, then: Callable[[], None] | None = None) -> None:
        receiver, loop = self._peer.other, asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()
        posts = [*self._flying, self._peer.post(len(message), lambda: None)]
        unfinished = len(posts)

        def landed(_: asyncio.Future[None]) -> None:
            nonlocal unfinished
            unfinished -= 1
            if unfinished:
                return
            failures = [error for post in posts if (error := post.exception()) is not None]
            if failures:
                sent.set_exception(failures[0])
                sent.exception()
                return
            if message:
                _hand_over(receiver, message)
            sent.set_result(None)

        for post in posts:
            post.add_done_callback(landed, context=_of_the_network())
        if then is not None:
            sent.add_done_callback(lambda done: loop.call_soon(then) if done.exception() is None else None)
        self._flying.append(sent)

    async def drain(self, timeout_s: float) -> None:
        flying = [put for put in self._flying if not put.done()]
        if flying:
            _, pending = await asyncio.wait(flying, timeout=timeout_s)
            if pending:
                raise DeadlineExceeded("puts are in flight")
        for put in self._flying:
            error = put.exception()
            if error is not None:
                raise PeerLost(str(error))

    def stop(self) -> None:
        self._stopped = True


def _hand_over(member: SimTransport, message: bytes) -> None:
    """A message to a member's handler, run as its process."""
    if not member.alive:
        return

    async def handle() -> None:
        member.handler(message)

    member.process.start(handle())


def _of_the_network() -> Any:
    """A context that belongs to no process: the network's."""
    import contextvars

    return contextvars.Context()


def local(region: SimRegion, offset: int, length: int) -> Bytes:
    """Part of a process' own memory. Raises `TargetInvalid`."""
    if offset < 0 or offset + length > region.length:
        raise TargetInvalid(f"[{offset}, {offset + length}) is outside of {region.length} bytes", field="source")
    return region.view[offset : offset + length]
