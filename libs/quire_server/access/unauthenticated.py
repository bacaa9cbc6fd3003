"""Calls of unauthenticated peers: the wait for their requests is bounded, and so is the number of health checks.

A call takes a place at the server as soon as its headers arrive. gRPC starts a handler of one request when the request
has arrived, and a handler of a stream of requests at once: the latter can refuse the caller by the headers, and give up
waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from quire.model.errors import DeadlineExceeded, InvalidRequest, QuireError, TooManyRequests

_FIRST_MESSAGE_S: Final = 30.0
_HEALTH_MESSAGE_S: Final = 5.0
_HEALTH_MAX: Final = {"Check": 64, "Watch": 64}
_REFLECTION_MAX: Final = 16

Abort = Callable[[Any, QuireError], Awaitable[None]]


async def first_message(requests: AsyncIterator[Any], within_s: float = 0.0) -> Any:
    """Wait for the request of a call, `within_s` or half a minute at most.

    Raises `DeadlineExceeded`, `InvalidRequest` if there is none.
    """
    within_s = within_s or _FIRST_MESSAGE_S
    try:
        async with asyncio.timeout(within_s):
            async for request in requests:
                return request
    except TimeoutError:
        raise DeadlineExceeded(f"no request within {within_s:.0f} s of its headers") from None
    except DecodeError as error:
        raise InvalidRequest(f"the request cannot be decoded: {error}") from None
    raise InvalidRequest("a call without a request")


class SideServices:
    """Bounds the calls of health and reflection, which need no credentials, apart from those of the service."""

    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        self._running: dict[str, int] = {}

    def bounded(self, handler: Any, method: str) -> Any:
        """A handler that refuses calls beyond the bound of its method."""
        name = method.rpartition("/")[2]
        bound = _HEALTH_MAX.get(name, _REFLECTION_MAX)
        serializers = handler.request_deserializer, handler.response_serializer
        if handler.stream_stream:
            reflect = self._within(name, bound, self._streamed(handler.stream_stream))
            return grpc.stream_stream_rpc_method_handler(reflect, *serializers)
        if handler.unary_stream:
            watch = self._within(name, bound, self._streamed(handler.unary_stream, single=True))
            return grpc.stream_stream_rpc_method_handler(watch, *serializers)

        async def check(requests: AsyncIterator[Any], context: Any) -> Any:
            return await handler.unary_unary(await first_message(requests, _HEALTH_MESSAGE_S), context)

        return grpc.stream_unary_rpc_method_handler(self._within(name, bound, check), *serializers)

    def _streamed(self, behaviour: Callable[..., Any], *, single: bool = False) -> Callable[..., Awaitable[None]]:
        """Call a method that answers by a stream. `single`: it takes one request, not an iterator of requests."""

        async def call(requests: AsyncIterator[Any], context: Any) -> None:
            answers = behaviour(await first_message(requests, _HEALTH_MESSAGE_S) if single else requests, context)
            if not hasattr(answers, "__aiter__"):
                await answers
                return
            async for answer in answers:
                await context.write(answer)

        return call

    def _within(self, name: str, bound: int, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def call(requests: AsyncIterator[Any], context: Any) -> Any:
            running = self._running.get(name, 0)
            try:
                if running >= bound:
                    raise TooManyRequests(f"{running} calls of {name} run", retry_after_s=1.0)
                self._running[name] = running + 1
                try:
                    return await behaviour(requests, context)
                finally:
                    self._running[name] -= 1
            except QuireError as error:
                await self._abort(context, error)

        return call
