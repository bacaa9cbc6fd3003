"""Payloads that are copied in threads, in order, with their announcements in between."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from quire.model.errors import DeadlineExceeded, InternalError, PeerLost, QuireError, TargetInvalid
from quire.transport.fair_threads import FairThreads

Result = TypeVar("Result")
Bytes = npt.NDArray[np.uint8]
_AHEAD_BYTES: Final = 16 << 20


class Hearer(Protocol):
    """Receiver of a stream's messages."""

    def check(self) -> None:
        """Raise `PeerLost` if the receiver is lost."""

    def send(self, message: bytes) -> None: ...


class CopyStream:
    """The copies of a stream, by one thread at a time. Tenants take turns at the threads, as do streams of a tenant."""

    def __init__(self, peer: Hearer, threads: FairThreads, source: Bytes, target: Bytes, tenant: str = "") -> None:
        self._peer = peer
        self._threads = threads
        self._source = source
        self._target = target
        self._tenant = tenant
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._queued_bytes = 0
        self._running = self._stopped = False
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self.bytes_posted = 0

    async def send(self, offset: int, length: int, remote_offset: int) -> None:
        await self.gather(np.array([offset], dtype=np.int64), length, remote_offset)

    async def gather(self, offsets: npt.NDArray[np.int64], length: int, remote_offset: int) -> None:
        sources = [window(self._source, offset, length, "source") for offset in offsets.tolist()]
        target = window(self._target, remote_offset, length * len(sources), "target")

        def copy() -> None:
            for index, source in enumerate(sources):
                target[index * length : (index + 1) * length] = source

        await self.place(copy, target.nbytes)

    async def place(self, write: Callable[[], None], length: int) -> None:
        """Run `write` in its turn. Its errors end the stream: nothing more is written or announced."""
        self._check()
        self._push(length, write)
        self.bytes_posted += length
        while self._queued_bytes > _AHEAD_BYTES:
            self._news.clear()
            await self._news.wait()

    def announce(self, message: bytes, then: Callable[[], None] | None = None) -> None:
        def tell() -> None:
            if message:
                self._peer.send(message)
            if then is not None:
                self._loop.call_soon_threadsafe(then)

        if not self._stopped and self._error is None:
            self._push(0, tell)

    async def drain(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self._running:
                    self._news.clear()
                    if self._running:
                        await self._news.wait()
        except TimeoutError:
            raise DeadlineExceeded("copies are in flight") from None
        await asyncio.sleep(0)  # what the thread has asked the loop to call has been called
        if self._error is not None:
            raise self._error
        if not self._stopped:
            self._peer.check()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._drop()

    # ----

    def _check(self) -> None:
        if self._stopped:
            raise PeerLost("the stream was stopped")
        if self._error is not None:
            raise self._error
        self._peer.check()

    def _push(self, length: int, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append((length, job))
            self._queued_bytes += length
            begin, self._running = not self._running, True
        if begin:
            self._submit()

    def _work(self) -> None:
        """Jobs in order, until there is none, or another stream may have its turn."""
        copied = 0
        while copied < _AHEAD_BYTES:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    break
                length, job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:
                with self._lock:
                    self._error = error if isinstance(error, QuireError) else InternalError(f"a copy failed: {error!r}")
                    self._drop()
            copied += length
            with self._lock:
                self._queued_bytes -= length
            if length:
                self._tell()
        else:
            self._submit()
            return
        self._tell()

    def _submit(self) -> None:
        try:
            self._threads.submit(self._tenant, self._work)
        except RuntimeError:  # the transport was closed
            with self._lock:
                self._error, self._running = PeerLost("the transport was closed"), False
                self._drop()
            self._tell()

    def _drop(self) -> None:
        self._queued_bytes -= sum(length for length, _ in self._jobs)
        self._jobs.clear()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._news.set)


def window(view: Bytes, offset: int, length: int, field: str) -> Bytes:
    """Part of registered memory. Raises `TargetInvalid`."""
    if offset < 0 or length < 0 or offset + length > view.nbytes:
        raise TargetInvalid(f"[{offset}, {offset + length}) is outside of {view.nbytes} bytes", field=field)
    return view[offset : offset + length]


def wait_in_thread(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop run `work`, and wait for its end in a thread that copies. Raises the errors of `work`."""
    asyncio.run_coroutine_threadsafe(work, loop).result()


async def to_its_end(copying: asyncio.Future[Result]) -> Result:
    """Wait for a thread that copies, even when cancelled: the memory is in use until it ends."""
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        await asyncio.wait([copying])
        raise
