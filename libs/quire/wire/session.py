"""A session with a gateway: all requests of a client, over one stream. Generated stubs take it for a channel.

Each request has an id, and its answers come with it. The gateway counts its answers, and keeps those that have not been
confirmed: a stream that breaks is opened again, and the session continues. Requests fail as soon as it is clear that
the gateway is not there; the session is looked for as long as the gateway keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from grpc.aio import AioRpcError, Metadata

from quire.model.errors import NodeUnavailable
from quire.telemetry import background
from quire.wire.credentials import AUTHORIZATION, authorization
from quire.wire.status import said, unsent
from quire.wire.v1 import gateway_pb2 as pb
from quire.wire.version import SPOKEN

SESSION: Final = "/quire.v1.GatewayService/Session"
NAME_HEADER: Final = "quire-session-bin"
RECEIVED_HEADER: Final = "quire-session-received"
_CONFIRM_EVERY: Final = 64
_RETRY_S: Final = 0.05
_LOOK_S: Final = 0.2
_TRIES: Final = 4
_LEAVING_TRIES: Final = 20
_CLOSE_S: Final = 1.0


def field_of(path: str) -> str:
    """Return the field of a method's path, or name, in `SessionRequest` and `SessionResponse`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path.rpartition("/")[2]).lower()


METHODS: Final = {
    field_of(method.name): method
    for method in pb.DESCRIPTOR.services_by_name["GatewayService"].methods
    if method.name != "Session"
}
"""Those that are asked in a session, by their field."""


class SessionChannel:
    """Stands before `channel`.

    `token`: the credential. When a gateway stops, another one receives the requests that it has not taken.
    """

    def __init__(self, channel: Any, token: str = "") -> None:
        self._channel = channel
        self._header = authorization(token)
        self._session: _Session | None = None
        self._leaving: set[_Session] = set()

    @property
    def takes_samples(self) -> bool:
        """Whether the gateway has said that look-ups may have samples of keys."""
        return self._session is not None and self._session.takes_samples

    def unary_unary(self, path: str, *serializers: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
        """A request in the session; asked again in the next one if a gateway stopped before it took it."""
        field = field_of(path)

        async def ask(request: Any, *, timeout: float | None = None, metadata: Any = ()) -> Any:
            while True:
                with contextlib.suppress(_NotHeard):
                    return await self._current().ask(field, request, timeout, metadata)

        ask._method = path.encode()  # type: ignore[attr-defined]
        return ask

    def unary_stream(self, path: str, *serializers: Any, **options: Any) -> Callable[..., _Answers]:
        """A request in the session with several answers."""
        field = field_of(path)

        def ask(request: Any, *, timeout: float | None = None, metadata: Any = ()) -> _Answers:
            return _Answers(self._current, field, request, timeout, metadata)

        ask._method = path.encode()  # type: ignore[attr-defined]
        return ask

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """Open a stream of its own, outside the session."""
        return self._channel.stream_stream(*arguments, **options)

    async def close(self) -> None:
        """End the session: the gateway gives back its leases and stops its transfers."""
        ending = [*self._leaving, *([self._session] if self._session is not None else [])]
        await asyncio.gather(*(session.close() for session in ending))

    def _current(self) -> _Session:
        if self._session is None:
            method = self._channel.stream_stream(
                SESSION,
                request_serializer=pb.SessionRequest.SerializeToString,
                response_deserializer=pb.SessionResponse.FromString,
            )
            self._session = _Session(method, self._header, self._retire, self._leaving.discard)
        return self._session

    def _retire(self, session: _Session) -> None:
        """Note that the gateway stops."""
        self._leaving.add(session)
        if self._session is session:
            self._session = None


class _NotHeard(Exception):
    """The gateway stopped without taking the request: another one receives it."""


class _Answers:
    """Answers of one request, as they arrive."""

    def __init__(
        self,
        session: Callable[[], _Session],
        field: str,
        request: Any,
        timeout: float | None,
        metadata: Any,
    ) -> None:
        self._find = session
        self._asked = field, request, timeout, metadata
        self._cancel: Callable[[], None] = lambda: None
        self._stop: Callable[[], None] = lambda: None
        self._stopped = False

    def cancel(self) -> None:
        self._cancel()

    def stop(self) -> None:
        """Request the end. Answers continue; the last one is a `SessionStopped` unless the request was complete."""
        self._stopped = True
        self._stop()

    async def __aiter__(self) -> AsyncIterator[Any]:
        timeout, loop = self._asked[2], asyncio.get_running_loop()
        until_s = loop.time() + timeout if timeout is not None else None
        while not self._stopped:
            with contextlib.suppress(_NotHeard):
                async with contextlib.aclosing(self._answers(self._find(), until_s)) as answers:
                    async for answer in answers:
                        yield answer
                return
        yield pb.SessionStopped()  # no gateway has taken it

    async def _answers(self, session: _Session, until_s: float | None) -> AsyncGenerator[Any, None]:
        field, request, timeout, metadata = self._asked
        number, answers = session.begin(field, request, timeout, metadata)
        self._cancel = lambda: session.forget(number)
        self._stop = lambda: session.stop(number)
        try:
            while True:
                async with asyncio.timeout_at(until_s):
                    response = await answers.get()
                if isinstance(response, Exception):
                    raise response
                if response.HasField(field):
                    yield getattr(response, field)
                elif response.HasField("stopped"):
                    yield response.stopped
                if response.last:
                    return
        except TimeoutError:
            raise session.late(number, f"no end within {timeout} s") from None
        finally:
            session.forget(number)


class _Session:
    """Session with one gateway.

    `leaves` is called when that stops, `ended` when it has answered all that it had taken.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        header: str,
        leaves: Callable[[_Session], None],
        ended: Callable[[_Session], None],
    ) -> None:
        self._method = method
        self._header = header
        self._leaves = leaves
        self._ended = ended
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[Any]] = {}
        self._unheard: deque[pb.SessionRequest] = deque()
        self._outgoing: deque[pb.SessionRequest] = deque()
        self._written: set[int] = set()
        self._stream: Any = None
        self._writing = False
        self._token = b""
        self.takes_samples = False
        self._renew_s = self._grace_s = 0.0
        self._received = self._confirmed = 0
        self._leaving = self._closing = False
        self._wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ---- requests

    async def ask(self, field: str, request: Any, timeout: float | None, metadata: Any) -> Any:
        """The one answer. Raises `AioRpcError`."""
        number, answers = self.begin(field, request, timeout, metadata)
        try:
            async with asyncio.timeout(timeout):
                response = await answers.get()
        except TimeoutError:
            raise self.late(number, f"no answer within {timeout} s") from None
        finally:
            self.forget(number)
        if isinstance(response, Exception):
            raise response
        return getattr(response, field)

    def begin(self, field: str, request: Any, timeout: float | None, metadata: Any) -> tuple[int, asyncio.Queue[Any]]:
        """Queue a request; its id, and where its answers will be. `forget` it at the end."""
        number, answers = next(self._ids), asyncio.Queue[Any]()
        message = pb.SessionRequest(
            id=number,
            timeout_ms=min(round(timeout * 1000), 0xFFFFFFFF) if timeout is not None else 0,
            traceparent=next((value for key, value in metadata or () if key == "traceparent"), ""),
            **{field: request},
        )
        self._waiting[number] = answers
        self._unheard.append(message)
        if not self._tasks or self._tasks[0].done():
            self._tasks = [asyncio.create_task(self._run(), context=background())]
        self._say(message)
        self._wanted.set()
        return number, answers

    def late(self, number: int, why: str) -> AioRpcError:
        """The error of a request whose time is over."""
        error = _error(grpc.StatusCode.DEADLINE_EXCEEDED, why)
        return error if number in self._written else unsent(error)

    def stop(self, number: int) -> None:
        """Cancel a request, but follow it to its last answer. An unsent request has reached no storage node."""
        answers = self._waiting.get(number)
        if answers is None:
            return
        if self._take_back(number):
            del self._waiting[number]
            answers.put_nowait(pb.SessionResponse(id=number, last=True, stopped=pb.SessionStopped()))
        else:
            self._cancel(number)

    def forget(self, number: int) -> None:
        """Stop listening to the answers of a request; without an answer so far, the gateway is notified."""
        self._written.discard(number)
        if self._waiting.pop(number, None) is not None and not self._take_back(number):
            self._unheard = deque(message for message in self._unheard if message.id != number)
            self._cancel(number)

    def _take_back(self, number: int) -> bool:
        """Remove a request that was not sent to this gateway yet; whether it was one."""
        unsent = [message for message in self._outgoing if message.id == number]
        for message in unsent:
            self._outgoing.remove(message)
            self._unheard.remove(message)
        return bool(unsent)

    def _cancel(self, number: int) -> None:
        cancel = pb.SessionRequest(id=next(self._ids), cancel=number)
        self._unheard.append(cancel)
        self._say(cancel)

    async def _send(self) -> None:
        """Write the queue, in order. In a task of its own: a write that is cancelled would end the stream."""
        try:
            while self._outgoing and (stream := self._stream) is not None:
                message = self._outgoing.popleft()
                if message.id in self._waiting:
                    self._written.add(message.id)
                message.received = self._confirmed = self._received
                try:
                    await stream.write(message)
                except (AioRpcError, asyncio.InvalidStateError):
                    if self._stream is stream:
                        return  # it has ended: its reader will say why, and what was not heard is sent on the next one
        finally:
            self._writing = False

    async def close(self) -> None:
        """End the session; open requests fail."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                if self._stream is not None and not self._leaving:
                    self._say(pb.SessionRequest(close=pb.SessionClose()))
                    await asyncio.wait(self._tasks[:1])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(_error(grpc.StatusCode.CANCELLED, "the client was closed"))

    # ---- the stream

    async def _run(self) -> None:
        """Keep the stream open, until it is clear that the session is over."""
        loop = asyncio.get_running_loop()
        until_s, tries = loop.time(), 0
        while True:
            self._wanted.clear()
            cancelled = False
            try:
                await self._follow()
                error, tries = _error(grpc.StatusCode.UNAVAILABLE, "the gateway ended the session"), 0
            except AioRpcError as failure:
                error, cancelled = _as_broken(failure), failure.code() is grpc.StatusCode.CANCELLED
            if self._stream is not None:  # it was open until now
                self._stream, tries, cancelled = None, 0, False
                until_s = loop.time() + self._grace_s
            tries += 1
            if self._leaving or self._closing or error.code() is not grpc.StatusCode.UNAVAILABLE:
                break
            # A gRPC server that stops cancels a stream that it has not taken up yet: nothing was sent on that.
            leaves = cancelled or said(error) == NodeUnavailable.code()
            if leaves and tries < _LEAVING_TRIES:
                await asyncio.sleep(_RETRY_S)  # the channel will find another one in a moment
            elif tries < _TRIES and self._token:
                await asyncio.sleep(_RETRY_S * (tries - 1))
            else:
                self._fail(_error(grpc.StatusCode.UNAVAILABLE, str(error.details())) if leaves else error)
                if loop.time() >= until_s:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wanted.wait()
        self._token = b""
        self._fail(error)
        self._ended(self)

    async def _follow(self) -> None:
        """Follow one stream, from its opening to its end. Raises `AioRpcError`."""
        credentials = ((AUTHORIZATION, self._header),) if self._header else ()
        resumed = ((NAME_HEADER, self._token), (RECEIVED_HEADER, str(self._received))) if self._token else ()
        stream = self._method(metadata=(*SPOKEN, *credentials, *resumed))
        renewing: asyncio.Task[None] | None = None
        try:
            # Nothing is written before it is open: a write to a stream that was refused hides why.
            async for response in stream:
                if renewing is not None:
                    self._take(response)
                    continue
                await self._opened(response)
                self._stream = stream
                renewing = asyncio.create_task(self._renew())
                self._send_soon()
        finally:
            if renewing is not None:
                renewing.cancel()
            stream.cancel()

    async def _opened(self, response: pb.SessionResponse) -> None:
        opened = response.opened
        if not opened.resumed:
            if self._token:  # the one that this client had is over, and what was asked in it
                self._fail(_error(grpc.StatusCode.UNAVAILABLE, "the gateway does not know the session any more"))
            self._received = self._confirmed = 0
        self._token, self.takes_samples = opened.session, opened.takes_samples
        self._renew_s, self._grace_s = opened.renew_ms / 1000, opened.grace_ms / 1000
        self._hear(response.heard)
        self._outgoing = deque(self._unheard)

    def _take(self, response: pb.SessionResponse) -> None:
        self._hear(response.heard)
        if response.number:
            if response.number <= self._received:
                return
            self._received = response.number
        if response.HasField("leaving"):
            self._leaving = True
            self._leaves(self)
            return
        answers = self._waiting.get(response.id)
        if answers is not None:
            if response.last:
                del self._waiting[response.id]
            answers.put_nowait(_failure(response.error) if response.HasField("error") else response)
        if self._received - self._confirmed >= _CONFIRM_EVERY:
            self._confirmed = self._received
            self._say(pb.SessionRequest())

    def _hear(self, number: int) -> None:
        while self._unheard and self._unheard[0].id <= number:
            self._unheard.popleft()

    def _say(self, message: pb.SessionRequest) -> None:
        """Send it, if there is a stream. One that has an id is sent on the next one, if that does not get there."""
        if self._stream is not None:
            self._outgoing.append(message)
            self._send_soon()

    def _send_soon(self) -> None:
        if self._outgoing and not self._writing:
            self._writing = True
            self._tasks = [self._tasks[0], asyncio.create_task(self._send(), context=background())]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            self._say(pb.SessionRequest(renew=pb.SessionRenew(authorization=self._header)))

    def _fail(self, error: AioRpcError) -> None:
        """Fail all open requests."""
        unanswered, self._waiting = self._waiting, {}
        unheard = {message.id for message in self._unheard} if self._leaving else set()
        self._unheard.clear()
        self._outgoing.clear()
        for number, answers in unanswered.items():
            failure = error if number in self._written else unsent(error)
            answers.put_nowait(_NotHeard() if number in unheard else failure)
        self._written.clear()


def _as_broken(error: AioRpcError) -> AioRpcError:
    """A connection that broke under a write ends its stream as INTERNAL. Quire's servers name their internal errors."""
    if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED) and not said(error):
        return _error(grpc.StatusCode.UNAVAILABLE, str(error.details()))
    return error


def _failure(error: pb.SessionError) -> AioRpcError:
    code = next((status for status in grpc.StatusCode if status.value[0] == error.status), grpc.StatusCode.UNKNOWN)
    return AioRpcError(code, Metadata(), Metadata(*error.trailers.items()), error.message)


def _error(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details)
