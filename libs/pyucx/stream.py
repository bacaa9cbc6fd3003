"""Ordered payloads into a peer's memory, each announced by a message once it is complete there.

This is the verb that layerwise delivery is made of: put, flush, and only then the message. A message that overtakes its
put was seen to announce 191 of 192 layers before their bytes were there. Puts are cut into slices, and at most a
window of bytes is in flight, so that a message never queues behind a whole payload and the loop never stalls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyucx._library import status_text
from pyucx.context import Memory
from pyucx.errors import Closed, OperationFailed, OperationTimeout, PeerDied, UcxError
from pyucx.gather import GatherTable

if TYPE_CHECKING:
    from pyucx.endpoint import Endpoint, RemoteMemory


@dataclass(slots=True)
class _Announcement:
    """A payload whose puts are posted: its message goes out when all of them, and the flush behind them, are done."""

    message: bytes = b""
    then: Callable[[], None] | None = None
    puts_left: int = 0
    flushed: bool = False


class Stream:
    """Stream of one producer's payloads, in order. Made by `Endpoint.stream`; not for two tasks at once.

    `send` and `gather` return when the bytes are posted, `drain` when everything has arrived and been announced.
    After an error nothing more is announced; `drain` then waits for the puts in flight and raises.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        source: Memory,
        remote: RemoteMemory,
        message_id: int,
        *,
        window_bytes: int,
        slice_bytes: int,
    ) -> None:
        if not 0 < slice_bytes <= window_bytes:
            raise ValueError(f"slice_bytes {slice_bytes} must be positive and at most window_bytes {window_bytes}")
        self._endpoint = endpoint
        self._source = source
        self._remote = remote
        self._message_id = message_id
        self._window_bytes = window_bytes
        self._slice_bytes = slice_bytes
        self._in_flight_bytes = 0
        self._in_flight_puts = 0
        self._unannounced: deque[_Announcement] = deque()
        self._pending = _Announcement()
        self._status = 0
        self._stopped = False
        self._waiter: asyncio.Future[None] | None = None
        self._flushing = False
        self.bytes_posted = 0

    async def send(self, offset: int, length: int, remote_offset: int) -> None:
        """Put a contiguous range of the source."""
        self._remote.at(remote_offset, length)
        self._source.pointer(offset, length)
        for start in range(0, length, self._slice_bytes):
            size = min(self._slice_bytes, length - start)
            await self._room()
            with self._put(size) as done:
                self._endpoint.post_put(self._source, offset + start, size, self._remote, remote_offset + start, done)

    async def gather(self, offsets: npt.NDArray[np.int64], length: int, remote_offset: int) -> None:
        """Put `length` bytes from each of `offsets` of the source, back to back at `remote_offset`."""
        self._remote.at(remote_offset, length * len(offsets))
        if length >= self._slice_bytes:
            for index, offset in enumerate(offsets.tolist()):
                await self.send(offset, length, remote_offset + index * length)
            return
        table = GatherTable(self._source, offsets, length)
        per_put = max(1, self._slice_bytes // length)
        for start in range(0, len(offsets), per_put):
            count = min(per_put, len(offsets) - start)
            await self._room()
            with self._put(count * length) as done:
                self._endpoint.post_put_gathered(
                    table, start, count, self._remote, remote_offset + start * length, done
                )

    def announce(self, message: bytes, then: Callable[[], None] | None = None) -> None:
        """Send `message` (unless it is empty), and call `then`, once all that was put so far has arrived.

        Returns at once.
        """
        self._check()
        announcement, self._pending = self._pending, _Announcement()
        announcement.message, announcement.then = message, then
        self._unannounced.append(announcement)

        def flushed(status: int) -> None:
            announcement.flushed = True
            self._note(status)
            self._advance()

        self._endpoint.post_flush(flushed)

    async def drain(self, timeout_s: float = 30.0) -> None:
        """Wait until nothing is in flight and everything is announced. Raises the first error on the way.

        After this returned or raised anything but `OperationTimeout`, neither side's memory is touched any longer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._in_flight_puts or self._unannounced or self._flushing:
                    await self._wait()
        except TimeoutError:
            raise OperationTimeout(f"{self._in_flight_bytes} bytes still in flight after {timeout_s} s") from None
        if self._status < 0:
            self._raise()

    def stop(self) -> None:
        """Post and announce nothing more; `drain` then waits until the puts in flight have arrived.

        A put that has completed here may still be on its way: only a flush behind it says that it is not.
        """
        if not self._stopped:
            self._stopped = self._flushing = True
            self._unannounced.clear()
            try:
                self._endpoint.post_flush(self._arrived)
            except UcxError:  # the connection has failed: nothing more arrives by it
                self._arrived(0)
        self._wake()

    # ----

    def _arrived(self, status: int) -> None:
        self._flushing = False
        self._note(status)
        self._wake()

    @contextlib.contextmanager
    def _put(self, size: int) -> Iterator[Callable[[int], None]]:
        """Count a put of `size` bytes as in flight; yields its completion. One that cannot be posted is not counted."""
        announcement = self._pending
        announcement.puts_left += 1
        self._in_flight_puts += 1
        self._in_flight_bytes += size
        self.bytes_posted += size

        def done(status: int) -> None:
            announcement.puts_left -= 1
            self._in_flight_puts -= 1
            self._in_flight_bytes -= size
            self._note(status)
            self._advance()

        try:
            yield done
        except UcxError:
            done(0)
            self.bytes_posted -= size
            raise

    def _note(self, status: int) -> None:
        # A failed put shows in its own status and in the endpoint's error, not in the flush: all three count.
        if status < 0 and self._status == 0:
            self._status = status
        if self._endpoint.error is not None and self._status == 0:
            self._status = self._endpoint.error.status

    def _advance(self) -> None:
        unannounced = self._unannounced
        if self._status < 0:
            unannounced.clear()
        while unannounced and unannounced[0].flushed and unannounced[0].puts_left == 0:
            complete = unannounced.popleft()
            if complete.message:
                self._endpoint.send(self._message_id, complete.message)
            if complete.then is not None:
                complete.then()
        self._wake()

    async def _room(self) -> None:
        if self._in_flight_bytes >= self._window_bytes:
            # Refilled when half empty: waking up for every slice would cost as much as posting it.
            while self._in_flight_bytes > self._window_bytes // 2 and not self._stopped and self._status == 0:
                await self._wait()
        self._check()

    async def _wait(self) -> None:
        self._waiter = self._endpoint.worker.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        idle = not self._in_flight_puts or self._in_flight_bytes <= self._window_bytes // 2
        if (idle or self._status or self._stopped) and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check(self) -> None:
        if self._stopped:
            raise Closed("the stream was stopped")
        if self._endpoint.error is not None:
            raise self._endpoint.error
        if self._status < 0:
            self._raise()

    def _raise(self) -> None:
        kind = PeerDied if self._endpoint.error is not None else OperationFailed
        raise kind("stream", self._status, status_text(self._status))
