"""Requests between simulated processes: generated stubs on one side, generated servicers on the other, no sockets.

Messages are delayed, reordered among each other, cut off and lost with the connection. A caller learns of a server's
death after a moment; a cut link shows only at its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc.aio import AioRpcError, Metadata

from quire.model.errors import InternalError, QuireError
from quire.testing.simulation.loop import Process, SimulatedLoop, current_process
from quire.wire.status import status_of, trailers_of

_Metadata = tuple[tuple[str, str | bytes], ...]
_RESOLUTION_S = 1e-8  # timers fire that much early, without moving the clock
_numbers = itertools.count()
_REFUSED_S: Final = 0.05
_STRAGGLERS: Final = 0.01  # share of messages that take much longer


@dataclass(slots=True)
class Network:
    """Listening processes, and the pairs without a connection. `latency_s`: bounds of one way.

    `stuck`: data does not pass between these, and their connections cannot be torn down: posted writes land later.
    `unreachable`: neither of these can open a connection to the other's memory. `noisy`: writes of one of these into
    the other's memory arrive with one byte changed. `slow_threads`: up to how many seconds threads that copy are late
    at each step, by the process that they are of. `unanswered`: servers whose answers are lost, after the request was
    carried out: the connection breaks before.
    """

    loop: SimulatedLoop
    latency_s: tuple[float, float] = (100e-6, 600e-6)
    servers: dict[str, SimServer] = field(default_factory=dict)
    cuts: set[frozenset[str]] = field(default_factory=set)
    stuck: set[frozenset[str]] = field(default_factory=set)
    noisy: set[frozenset[str]] = field(default_factory=set)
    unreachable: set[frozenset[str]] = field(default_factory=set)
    unanswered: set[str] = field(default_factory=set)
    slow: dict[str, float] = field(default_factory=dict)
    slow_threads: dict[str, float] = field(default_factory=dict)
    streams: set[SimDuplex] = field(default_factory=set)
    messages: int = 0

    def reaches(self, sender: Process | None, receiver: Process | None) -> bool:
        """Whether messages get from one to the other."""
        if sender is None or receiver is None or sender is receiver:
            return True
        return frozenset((sender.name, receiver.name)) not in self.cuts

    def reset(self, name: str) -> None:
        """Connections of a process break: messages on their way are lost, and both sides are notified."""
        for stream in sorted(self.streams, key=lambda stream: stream.number):
            if stream.client.name == name:
                stream.reset()

    async def travel(self, sender: Process | None, receiver: Process | None) -> None:
        """Delay a message on its way; for ever while the link is cut."""
        self.messages += 1
        extra = sum(self.slow.get(process.name, 0.0) for process in (sender, receiver) if process is not None)
        if self.loop.random.random() < _STRAGGLERS:
            extra += self.loop.random.uniform(0.0, 0.1)
        await asyncio.sleep(self.loop.random.uniform(*self.latency_s) + extra)
        while not self.reaches(sender, receiver):
            await asyncio.sleep(0.2)


class SimServer:
    """The server that `add_…Servicer_to_server` needs; it answers at an address while its process lives."""

    def __init__(self, network: Network, address: str, process: Process) -> None:
        self.process = process
        self.handlers: dict[str, Any] = {}
        network.servers[address] = self

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignored: `add_registered_method_handlers` gets the same."""
        return

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """A service's methods, by name."""
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class SimChannels:
    """A `ChannelPool` of the process that opens it."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def stub(self, service: Callable[[Any], Any], address: str) -> Any:
        return service(self.get(address))

    def get(self, address: str) -> SimChannel:
        return SimChannel(self._network, self._process, address)

    async def close(self) -> None:
        return


class _Context:
    """The part of a gRPC context that servicers use."""

    def __init__(self, metadata: _Metadata = ()) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> _Metadata:
        return self._metadata

    def peer(self) -> str:
        return "simulated"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


class SimChannel:
    """Calls whatever listens at the address then."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network = network
        self._process = process
        self._address = address

    def unary_unary(self, path: str, *serializers: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
        """A call with one answer, as grpc.aio's."""

        async def ask(request: Any, *, timeout: float | None = None, metadata: Any = None) -> Any:
            return await self._within(timeout, self._ask(path, request))

        ask._method = path.encode()  # type: ignore[attr-defined]
        return ask

    def unary_stream(self, path: str, *serializers: Any, **options: Any) -> Callable[..., SimStream]:
        """A call with a stream of answers, as grpc.aio's."""

        def ask(request: Any, *, timeout: float | None = None, metadata: Any = None) -> SimStream:
            return SimStream(self, path, request, timeout)

        ask._method = path.encode()  # type: ignore[attr-defined]
        return ask

    def stream_stream(self, path: str, *serializers: Any, **options: Any) -> Callable[..., SimDuplex]:
        """A call with a stream each way, as grpc.aio's."""
        return lambda *, metadata=(): SimDuplex(self, path, metadata)

    async def gone(self) -> None:
        """Return when the server's process is dead."""
        server = self._network.servers.get(self._address)
        if server is not None and not server.process.dead:
            await server.process.died()

    async def _within(self, timeout: float | None, answer: Any) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout} s") from None

    async def _ask(self, path: str, request: Any) -> Any:
        server = await self._reach()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        copy = type(request)()
        copy.CopyFrom(request)

        async def serve() -> None:
            try:
                result = await server.handlers[path].unary_unary(copy, _Context())
            except Exception as error:
                self._settle(answer, None, error)
            else:
                self._settle(answer, result, None)

        task = server.process.start(serve())
        try:
            result = await self._or_death(server, answer)
        except asyncio.CancelledError:
            self._cancel_later(task)
            raise
        await self._network.travel(server.process, self._process)
        if server.process.name in self._network.unanswered:
            raise _error(grpc.StatusCode.UNAVAILABLE, f"the connection to {self._address} broke before its answer came")
        return result

    async def _reach(self) -> SimServer:
        server = self._network.servers.get(self._address)
        if server is None or server.process.dead:
            await asyncio.sleep(_REFUSED_S)
            raise _error(grpc.StatusCode.UNAVAILABLE, f"{self._address} refuses connections")
        await self._network.travel(self._process, server.process)
        if server.process.dead:
            raise _error(grpc.StatusCode.UNAVAILABLE, f"{self._address} went away")
        return server

    async def _or_death(self, server: SimServer, answer: asyncio.Future[Any]) -> Any:
        death = asyncio.ensure_future(server.process.died())
        try:
            await asyncio.wait([answer, death], return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        if not answer.done():
            raise _error(grpc.StatusCode.UNAVAILABLE, f"{self._address} went away")
        return answer.result()

    @staticmethod
    def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(translated(error))
            answer.exception()

    def _cancel_later(self, task: asyncio.Task[Any]) -> None:
        """Notify the server that its caller has disconnected, unless the link is cut."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._network.loop.random.uniform(*self._network.latency_s), task.cancel)


class SimStream:
    """A server's answers, one after the other."""

    def __init__(self, channel: SimChannel, path: str, request: Any, timeout: float | None) -> None:
        self._channel = channel
        self._path = path
        self._request = type(request)()
        self._request.CopyFrom(request)
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._cancelled = False

    def cancel(self) -> None:
        if self._task is not None and not self._task.done() and not self._cancelled:
            self._cancelled = True
            self._channel._cancel_later(self._task)

    async def __aiter__(self) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout if self._timeout is not None else None
        server = await self._channel._within(self._timeout, self._channel._reach())
        self._task = server.process.start(self._serve(server))
        while True:
            left_s = deadline_s - loop.time() if deadline_s is not None else None
            if left_s is not None and left_s <= _RESOLUTION_S:
                self.cancel()
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, f"no end within {self._timeout} s")
            kind, value = await self._next(server, left_s)
            if kind == "":
                continue
            await self._channel._network.travel(server.process, self._channel._process)
            if kind == "end":
                return
            if isinstance(value, Exception):
                raise value
            yield value

    async def _next(self, server: SimServer, left_s: float | None) -> tuple[str, Any]:
        """Return the server's next message; none if the deadline passes before that."""
        message = asyncio.ensure_future(self._queue.get())
        death = asyncio.ensure_future(server.process.died())
        try:
            await asyncio.wait([message, death], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                kind, value = message.result()
                return str(kind), value
            if server.process.dead:
                raise _error(grpc.StatusCode.UNAVAILABLE, "the server went away")
            return "", None
        finally:
            message.cancel()
            death.cancel()

    async def _serve(self, server: SimServer) -> None:
        try:
            async with contextlib.aclosing(
                server.handlers[self._path].unary_stream(self._request, _Context())
            ) as answers:
                async for answer in answers:
                    self._queue.put_nowait(("answer", answer))
        except Exception as error:
            self._queue.put_nowait(("error", translated(error)))
        else:
            self._queue.put_nowait(("end", None))


class SimDuplex:
    """A stream in both directions: messages arrive in order, and either side notices the other's death."""

    def __init__(self, channel: SimChannel, path: str, metadata: _Metadata) -> None:
        self._channel = channel
        self._path = path
        self._metadata = metadata
        self.number = next(_numbers)
        self._up: asyncio.Queue[Any] = asyncio.Queue()
        self._down: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[Any]] = []
        self._serving: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()

    @property
    def client(self) -> Process:
        return self._channel._process

    def reset(self) -> None:
        """The connection breaks, now."""
        self._down = asyncio.Queue()  # what was on its way
        self._broken.set()
        self.cancel()

    async def write(self, message: Any) -> None:
        copy = type(message)()
        copy.CopyFrom(message)
        self._up.put_nowait(copy)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._serving is not None and not self._serving.done():
            self._channel._cancel_later(self._serving)
            self._serving = None

    async def __aiter__(self) -> AsyncIterator[Any]:
        server = await self._channel._reach()
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._carry(server, arrived))]
        self._serving = server.process.start(self._serve(server, arrived))
        server.process.start(self._until_alone(self._serving))
        broken = asyncio.ensure_future(self._broken.wait())
        streams = self._channel._network.streams
        streams.add(self)
        try:
            while True:
                kind, value = await self._next(server, broken)
                await self._channel._network.travel(server.process, self._channel._process)
                if broken.done():
                    raise _error(grpc.StatusCode.UNAVAILABLE, "the connection broke")
                if kind == "end":
                    return
                if isinstance(value, Exception):
                    raise value
                yield value
        finally:
            streams.discard(self)
            broken.cancel()

    async def _next(self, server: SimServer, broken: asyncio.Future[Any]) -> tuple[str, Any]:
        """Return the server's next message. Raises at the end of the connection."""
        while True:
            message = asyncio.ensure_future(self._down.get())
            death = asyncio.ensure_future(server.process.died())
            try:
                await asyncio.wait([message, death, broken], return_when=asyncio.FIRST_COMPLETED)
                if broken.done() or server.process.dead:
                    raise _error(grpc.StatusCode.UNAVAILABLE, "the connection broke")
                if message.done():
                    return message.result()
            finally:
                message.cancel()
                death.cancel()

    async def _carry(self, server: SimServer, arrived: asyncio.Queue[Any]) -> None:
        while True:
            message = await self._up.get()
            await self._channel._network.travel(self._channel._process, server.process)
            arrived.put_nowait(message)

    async def _until_alone(self, serving: asyncio.Task[None]) -> None:
        """A dead client disconnects; a cut link is silent."""
        client = self._channel._process
        while not client.dead and not serving.done():
            death = asyncio.ensure_future(client.died())
            await asyncio.wait([death, serving], return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
        serving.cancel()

    async def _serve(self, server: SimServer, arrived: asyncio.Queue[Any]) -> None:
        async def requests() -> AsyncIterator[Any]:
            while True:
                yield await arrived.get()

        try:
            async with contextlib.aclosing(
                server.handlers[self._path].stream_stream(requests(), _Context(self._metadata))
            ) as answers:
                async for answer in answers:
                    copy = type(answer)()
                    copy.CopyFrom(answer)
                    self._down.put_nowait(("answer", copy))
        except Exception as error:
            self._down.put_nowait(("error", translated(error)))
        else:
            self._down.put_nowait(("end", None))


def translated(error: Exception) -> Exception:
    """Return the caller's error for an exception of a servicer."""
    if isinstance(error, AioRpcError):
        return error
    if not isinstance(error, QuireError):
        unexpected.append(error)
        error = InternalError("internal error; the service's log has the details")
    return AioRpcError(status_of(error), Metadata(), Metadata(*trailers_of(error)), str(error))


unexpected: list[BaseException] = []
"""Exceptions that no servicer should raise; simulations look here."""


def _error(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details)


__all__ = ["Network", "SimChannel", "SimChannels", "SimServer", "current_process", "translated", "unexpected"]
