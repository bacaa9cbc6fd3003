"""Channels to other services: one per address, kept; each call with a deadline, the trace, and typed errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from opentelemetry import trace

from quire.model.errors import InvalidRequest, Unavailable
from quire.telemetry import headers, names, tracer
from quire.wire.addresses import grpc_target, host_and_port
from quire.wire.credentials import Caller, interceptors
from quire.wire.status import error_of, went_away
from quire.wire.tls import RotatingChannel, Tls
from quire.wire.version import SPOKEN

Stub = TypeVar("Stub")
MESSAGE_BYTES_MAX: Final = 32 << 20
"""Of one gRPC message. Bulk data goes elsewhere."""

_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # How long one attempt to connect may take, whatever its name says: TCP, TLS and the server's first frame.
    ("grpc.min_reconnect_backoff_ms", 3000),
]


_KINDS: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class ChannelPool:
    """Channels by address. Use from one loop.

    `tls`: with whom to speak, and as whom; `token`: what to show; `caller`: the member that calls without TLS.
    """

    def __init__(self, tls: Tls | None = None, token: str = "", caller: Caller | None = None) -> None:
        self._tls = tls
        self._caller = caller
        self._token = token
        self._channels: dict[str, Any] = {}
        self._stubs: dict[tuple[Callable[[Any], Any], str], Any] = {}

    def get(self, address: str) -> Any:
        """Return the channel to host:port; it connects at the first call, and reconnects.

        Of several, separated by commas (IP addresses of one family, not names), the first that answers; when it
        disconnects the next one. Raises `InvalidRequest` for others.
        """
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open(address)
        return channel

    def stub(self, service: Callable[[Any], Stub], address: str) -> Stub:
        """Return the stub of a service at an address. It is kept: a new one makes all methods of the service."""
        stub: Stub | None = self._stubs.get((service, address))
        if stub is None:
            stub = self._stubs[service, address] = service(self.get(address))
        return stub

    def _open(self, address: str) -> Any:
        interceptors_, tls = interceptors(self._token), self._tls
        addresses = [part.strip() for part in address.split(",") if part.strip()]
        try:
            address = grpc_target(addresses)
        except ValueError as error:
            raise InvalidRequest(f"{address!r}: {error}", field="address") from None
        if len(addresses) > 1 and tls is not None and not tls.server_name:
            # One certificate for all of them: it has to name the first.
            tls = replace(tls, server_name=host_and_port(addresses[0])[0])
        if tls is not None:
            return RotatingChannel(address, tls, _OPTIONS, interceptors_)
        channel = grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=interceptors_)
        return _MembersChannel(channel, self._caller) if self._caller is not None else channel

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = self._channels, {}
        self._stubs.clear()
        for channel in channels.values():
            await channel.close()


class _MembersChannel:
    """Adds the header of a member to each call. An interceptor would take as long as a short call."""

    def __init__(self, channel: grpc.aio.Channel, caller: Caller) -> None:
        self._channel = channel
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._channel, name)
        return partial(self._method, attribute) if name in _KINDS else attribute

    def _method(self, make: Any, path: str, **options: Any) -> Any:
        method, header = make(path, **options), self._caller.header_for(path)

        def call(*request: Any, metadata: Any = (), **context: Any) -> Any:
            return method(*request, metadata=(*metadata, header), **context)

        call._method = path  # type: ignore[attr-defined]
        return call


async def call(method: Any, request: Any, *, timeout_s: float, again: bool = True) -> Any:
    """A unary call. Raises the `QuireError` that the server raised.

    `again`: asked once more if the server went away, which costs nothing where there is another one. Not for requests
    that name memory: the first may still be at it.
    """
    span, metadata = _begin(method)
    loop = asyncio.get_running_loop()
    began_s, first = loop.time(), True
    try:
        try:
            return await method(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if not again or not went_away(error):
                raise
            first = False
            span.add_event(names.EVENT_AGAIN)
            left_s = max(0.001, timeout_s - (loop.time() - began_s))
            return await method(request, timeout=left_s, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        span.set_attribute("rpc.status_code", error.code().name)
        failure = error_of(error)
        failure.unsent &= first
        raise failure from None
    finally:
        span.end()


class Stop:
    """Ends a stream from outside, with `now`. In a session, answers continue until the gateway reports the end."""

    def __init__(self) -> None:
        self._responses: Any = None
        self._wanted = False

    def now(self) -> None:
        """Request the end, once."""
        if not self._wanted:
            self._wanted = True
            self._ask()

    def of(self, responses: Any) -> None:
        """Bind to a stream's responses, which end at once if `now` was called before."""
        self._responses = responses
        self._ask()

    def _ask(self) -> None:
        if self._wanted and self._responses is not None:
            getattr(self._responses, "stop", self._responses.cancel)()


async def stream(
    method: Any, request: Any, *, timeout_s: float | None, stop: Stop | None = None
) -> AsyncGenerator[Any, None]:
    """A server-streaming call, with a deadline or for ever. Closing the generator early cancels it."""
    span, metadata = _begin(method)
    responses = method(request, timeout=timeout_s, metadata=metadata)
    if stop is not None:
        stop.of(responses)
    try:
        async for response in responses:
            yield response
    except grpc.aio.AioRpcError as error:
        span.set_attribute("rpc.status_code", error.code().name)
        raise error_of(error) from None
    finally:
        responses.cancel()
        span.end()


async def heard(messages: AsyncGenerator[Any, None], silence_s: float, peer: str) -> AsyncGenerator[Any, None]:
    """Yield the responses of `peer`. Cancels the stream and raises `Unavailable` after `silence_s` without one."""
    async with contextlib.aclosing(messages):
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    message = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise Unavailable(f"{peer} has been silent for {silence_s:g} s") from None
            yield message


def _begin(method: Any) -> tuple[trace.Span, tuple[tuple[str, str], ...]]:
    """A client span and the metadata that carry it. Not made current: a generator's span would leak into its caller."""
    path = getattr(method, "_method", b"")
    name = (path.decode() if isinstance(path, bytes) else str(path)).lstrip("/")
    span = tracer().start_span(name or "rpc", kind=trace.SpanKind.CLIENT, attributes={"rpc.system.name": "grpc"})
    return span, (*SPOKEN, *headers(trace.set_span_in_context(span)).items())
