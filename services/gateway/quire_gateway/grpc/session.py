"""Session of a client: its stream, its requests and its leases."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from quire.model.errors import (
    InvalidRequest,
    QuireError,
)
from quire.telemetry import logger
from quire.wire.v1 import gateway_pb2 as pb
from quire_gateway.access.admission import Principal
from quire_gateway.errors import RequestsExhausted
from quire_server.clock import Clock

_KEPT_MAX: Final = 512
_UNANSWERED_MAX: Final = 8192
"""Bound on a session's requests that run, or whose answers wait until the client confirms earlier ones."""
_LEASES_LOOKED: Final = 64

Release = Callable[[bytes], Awaitable[object]]


class SessionContext:
    """Context of a session's requests, in the place of a gRPC context."""

    def __init__(self, principal: Principal) -> None:
        self.principal = principal


class SessionStream:
    """Stream of a session. `sent`: the number of the last answer that was sent; `news`: messages without a number."""

    def __init__(self, sent: int) -> None:
        self.sent = sent
        self.news: deque[pb.SessionResponse] = deque()
        self.over = False
        self.error: QuireError | None = None
        self.wake = asyncio.Event()

    def end(self, error: QuireError | None = None) -> None:
        """Close once the queue has been sent."""
        self.over = True
        self.error = self.error or error
        self.wake.set()


class Session:
    """Session of one client. `answer` serves a request; `release` gives a lease back."""

    def __init__(
        self,
        principal: Principal,
        answer: Callable[[Session, pb.SessionRequest], Coroutine[Any, Any, None]],
        release: Release,
        clock: Clock,
    ) -> None:
        self.token = os.urandom(16)
        self.context = SessionContext(principal)
        self.unwatch: Callable[[], None] = lambda: None
        self.stream: SessionStream | None = None
        self.renewed_s = clock.monotonic_s()
        self.heard = self.absences = 0
        self.leaving = self._closed = False
        self.refusal: QuireError | None = None
        """Why requests are not begun any more, if the credentials are not valid any more."""
        self._answer = answer
        self._release = release
        self._clock = clock
        self._number = self._confirmed = 0
        self._kept: deque[pb.SessionResponse] = deque()
        self._room = asyncio.Event()
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._begun: set[int] = set()
        self._unwanted: set[int] = set()
        self._leases: dict[bytes, int] = {}
        self._leases_max = _LEASES_LOOKED

    @property
    def requests(self) -> int:
        """How many run."""
        return len(self._requests)

    # ---- what comes in

    def attach(self, received: int) -> SessionStream:
        """A stream for a client that has the answers up to `received`; the one before is at its end."""
        if self.stream is not None:
            self.stream.end()
        self.confirm(received)
        self.stream = SessionStream(self._confirmed)
        if self.leaving:
            self._say_leaving()
        return self.stream

    def take(self, message: pb.SessionRequest) -> None:
        """Take a request, unless it is a repeated one, or behind the last that the client knows is taken."""
        self.confirm(message.received)
        if message.id <= self.heard or self._closed:
            return
        if len(self._requests) >= _UNANSWERED_MAX:
            raise RequestsExhausted(f"{len(self._requests)} requests of this session are not answered")
        self.heard = message.id
        if message.HasField("cancel"):
            task = self._requests.get(message.cancel)
            if task is not None:
                self._unwanted.add(message.cancel)
                if message.cancel in self._begun:  # a task that is cancelled before its first step answers nothing
                    task.cancel()
            return
        task = asyncio.create_task(self._serve(message))
        self._requests[message.id] = task
        task.add_done_callback(partial(self._ended, message.id))

    def confirm(self, received: int) -> None:
        """The client has the answers up to that number."""
        if received > self._number:
            raise InvalidRequest(f"{received} answers, but there are {self._number}", field="received")
        while self._confirmed < received:
            self._confirmed += 1
            self._kept.popleft()
        self._room.set()

    def is_unwanted(self, request: int) -> bool:
        """Whether the client has cancelled a request."""
        return request in self._unwanted

    async def _serve(self, message: pb.SessionRequest) -> None:
        """Answer a request. One that was cancelled before its task began has reached no node: report it as stopped."""
        self._begun.add(message.id)
        if message.id in self._unwanted:
            await self.put(pb.SessionResponse(id=message.id, last=True, stopped=pb.SessionStopped()))
        else:
            await self._answer(self, message)

    def _ended(self, request: int, _: asyncio.Task[None]) -> None:
        del self._requests[request]
        self._begun.discard(request)
        self._unwanted.discard(request)
        self._end_if_left()

    # ---- what goes out

    async def put(self, response: pb.SessionResponse) -> None:
        """Number an answer, and send it as soon as there is a stream. Waits while too many are not confirmed."""
        while len(self._kept) >= _KEPT_MAX:
            self._room.clear()
            await self._room.wait()
        self._number += 1
        response.number = self._number
        self._kept.append(response)
        if self.stream is not None:
            self.stream.wake.set()

    async def responses(self, stream: SessionStream) -> AsyncIterator[pb.SessionResponse]:
        """Yield the messages of the stream, until it is over."""
        while True:
            stream.wake.clear()
            while stream.sent < self._number and self.stream is stream:
                stream.sent = max(stream.sent, self._confirmed) + 1
                response = self._kept[stream.sent - self._confirmed - 1]
                response.heard = self.heard
                yield response
            while stream.news:
                yield stream.news.popleft()
            if stream.over and not stream.wake.is_set():
                return
            await stream.wake.wait()

    def refuse(self, error: QuireError) -> None:
        """Refuse new requests.

        Running requests are answered first, as storage nodes may use the memory that they name; then the stream ends
        with the error.
        """
        self.refusal = error
        self._end_if_left()

    def leave(self) -> None:
        """The client opens another session, which has its leases too: what runs is answered, then this one ends."""
        self.leaving = True
        self._say_leaving()

    def _say_leaving(self) -> None:
        if self.stream is not None:
            self.stream.news.append(pb.SessionResponse(heard=self.heard, leaving=pb.SessionLeaving()))
            self.stream.wake.set()
        self._end_if_left()

    def _end_if_left(self) -> None:
        if self.refusal is not None and not self._requests and self.stream is not None:
            self.stream.end(self.refusal)
        if self.leaving and not self._requests and self.stream is not None:
            # Later requests are not taken: the client sends them to another gateway, and a transfer that ran at both
            # would be written to by one after the other had ended.
            self._closed = True
            self.stream.news.append(pb.SessionResponse(heard=self.heard))
            self.stream.end()

    # ---- leases

    def own(self, lease: bytes, expires_ms: int) -> None:
        """Keep a lease, to be given back at the session's end."""
        self._leases[lease] = expires_ms
        if len(self._leases) > self._leases_max:  # twice as many as were left when it was last looked at
            now_ms = self._clock.now_ms()
            self._leases = {lease: until_ms for lease, until_ms in self._leases.items() if until_ms > now_ms}
            self._leases_max = max(_LEASES_LOOKED, 2 * len(self._leases))

    def disown(self, lease: bytes) -> None:
        """The client gives it back itself."""
        self._leases.pop(lease, None)

    async def stop(self) -> None:
        """Stop what runs."""
        if self.stream is not None:
            self.stream.end()
        running = list(self._requests.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def end(self) -> None:
        """Stop what runs, and give back the leases, unless the client has them in another session."""
        await self.stop()
        if self.leaving:
            return
        leases, self._leases = self._leases, {}
        for lease, expires_ms in leases.items():
            if expires_ms > self._clock.now_ms():
                try:
                    await self._release(lease)
                except QuireError as error:
                    logger().warning("leases stay until they run out", error=str(error))
                    return
