"""The data plane between simulated processes of one host: threads copy, as those of `quire.transport.shared_memory` do.

The copies are the product's own (`CopyStream`), and so is their order; when a thread runs is drawn. It may stand still
between taking a copy and making it, while the loop goes on. The connection neither sticks nor is cut: it ends with a
process, or when one of the two closes it, and a copy that has begun is made all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt

from quire.model.errors import DeadlineExceeded, PeerLost
from quire.testing.simulation.loop import SimulatedLoop
from quire.testing.simulation.transport import SimPeer, SimRegion, SimRemote, SimTransport, local
from quire.transport.base import PayloadStream, Region, Remote
from quire.transport.copying import CopyStream, to_its_end

Bytes = npt.NDArray[np.uint8]
_PAUSE_S: Final = (2e-6, 200e-6)


class _Threads:
    """The executor of a stream of copies."""

    def __init__(self, peer: SimSharedPeer) -> None:
        self._network, self._process = peer.mine.fabric.network, peer.mine.process

    def submit(self, tenant: str, work: Callable[[], None]) -> None:
        """Run it after a while, in the process that submits it: never, if that dies before."""
        thread = _Thread(self._network.loop, work)
        self._network.loop.call_later(self._pause_s(), thread.go_on)

    def stand_still(self) -> None:
        """Called by a thread."""
        _Thread.running().pause(self._pause_s())

    def _pause_s(self) -> float:
        late_s = self._network.slow_threads.get(self._process.name, 0.0)
        random = self._network.loop.random
        return random.uniform(*_PAUSE_S) + late_s * random.random()


class _Thread:
    """A real thread that runs while the loop waits for it, and waits while the loop runs."""

    _local: ClassVar = threading.local()

    def __init__(self, loop: SimulatedLoop, work: Callable[[], None]) -> None:
        self._loop = loop
        self._turn, self._loops_turn = threading.Semaphore(0), threading.Semaphore(0)
        run = partial(contextvars.copy_context().run, self._run, work)
        threading.Thread(target=run, daemon=True).start()

    @classmethod
    def running(cls) -> _Thread:
        """The one that calls."""
        return cast(_Thread, cls._local.thread)

    def go_on(self) -> None:
        """Run the thread until it pauses or ends. Called by the loop."""
        self._turn.release()
        self._loops_turn.acquire()

    def pause(self, seconds: float) -> None:
        """Let the loop run. Called by the thread, which never continues if its process dies."""
        self._loop.call_later(seconds, self.go_on)
        self._loops_turn.release()
        self._turn.acquire()

    def _run(self, work: Callable[[], None]) -> None:
        self._local.thread = self
        self._turn.acquire()
        try:
            work()
        finally:
            self._loops_turn.release()


def wait_in_thread(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Stands in for `quire.transport.copying.wait_in_thread`: the loop runs while the simulated thread waits."""
    future, thread = asyncio.run_coroutine_threadsafe(work, loop), _Thread.running()
    while not future.done():
        thread.pause(_PAUSE_S[1])
    future.result()


class SimSharedPeer(SimPeer):
    """A connection to another process of the same host, whose memory is mapped here."""

    def __init__(self, transport: SimTransport, peer: SimTransport) -> None:
        super().__init__(transport, peer)
        self._threads = _Threads(self)
        self._streams: list[weakref.ref[CopyStream]] = []
        self._reads: set[asyncio.Future[None]] = set()

    def is_held(self) -> bool:
        return False

    def check(self) -> None:
        """Return if the connection stands. Raises `PeerLost`."""
        if self.error is not None:
            raise self.error

    def memory(self, remote: Remote) -> Bytes:
        assert isinstance(remote, SimRemote)
        return remote.window(0, remote.length)

    def stream(self, region: Region, remote: Remote, tenant: str = "") -> PayloadStream:
        assert isinstance(region, SimRegion) and isinstance(remote, SimRemote)
        stream = _Copies(self, self._threads, region.view, remote)
        self._streams = [reference for reference in self._streams if reference() is not None]
        self._streams.append(weakref.ref(stream))
        return stream

    async def get(
        self, region: Region, offset: int, length: int, remote: Remote, remote_offset: int, *, timeout_s: float
    ) -> None:
        assert isinstance(region, SimRegion) and isinstance(remote, SimRemote)
        self.check()
        target, source = local(region, offset, length), remote.window(remote_offset, length)
        reading: asyncio.Future[None] = self.mine.fabric.network.loop.run_in_executor(None, np.copyto, target, source)
        self._reads.add(reading)
        reading.add_done_callback(self._reads.discard)
        await to_its_end(reading)

    async def settle(self, timeout_s: float) -> None:
        for stream in filter(None, [reference() for reference in self._streams]):
            stream.stop()
            with contextlib.suppress(PeerLost):
                await stream.drain(timeout_s)
        if self._reads:
            _, pending = await asyncio.wait(self._reads, timeout=timeout_s)
            if pending:
                raise DeadlineExceeded("copies are in flight")


class _Copies(CopyStream):
    """Notes each copy into memory that is registered no more."""

    def __init__(self, peer: SimSharedPeer, threads: _Threads, source: Bytes, remote: SimRemote) -> None:
        super().__init__(peer, cast(Any, threads), source, remote.window(0, remote.length))
        self._region, self._fabric, self._writer = remote.region, peer.mine.fabric, peer.mine.process
        self._simulated = threads

    async def place(self, write: Callable[[], None], length: int) -> None:
        def noted() -> None:
            self._simulated.stand_still()
            if self._region.closed:
                self._fabric.late.append(f"a copy by {self._writer.name} landed in unregistered memory")
            write()

        await super().place(noted, length)


class SimNearestTransport(SimTransport):
    """Shared memory where both ends are of one host, the network everywhere else."""

    def _connected(self, peer: SimTransport) -> SimPeer:
        if self.fabric.share_memory(self.process, peer.process):
            return SimSharedPeer(self, peer)
        return super()._connected(peer)
