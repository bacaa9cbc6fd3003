"""An engine's answer on its way to the client: whole, or piece by piece as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import aiohttp
from aiohttp import web

from quire.telemetry import logger
from quire_server.http_requests import IDLE_S
from quire_tools.router.engine import EngineLost, RoutedEngine
from quire_tools.router.requests import REQUEST_ID, REQUEST_ID_HEADER, RequestError

_KEPT_HEADERS: Final = ("Content-Type", REQUEST_ID_HEADER, "Retry-After")
_ENGINE: Final = "X-Quire-Engine"
_AGAIN_STATUS: Final = 429
_STREAM: Final = "text/event-stream"
_DATA: Final = b"data:"
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_EVENT_MAX: Final = 1 << 16


class ClientGone(Exception):
    """The client has closed its connection."""


class AnswerRefused(EngineLost):
    """The engine answered with an error that another engine may not have.

    Args:
        engine: The engine.
        answer: Its answer, for the client if no other engine does better.
    """

    def __init__(self, engine: RoutedEngine, answer: web.Response) -> None:
        super().__init__(engine, f"answers {answer.status}")
        self.answer = answer


class Relay:
    """The answer to one request of a client.

    Args:
        downstream: The request.
        on_first: Called when the first token is there, with whether the answer is a stream, and not whole by then.
    """

    def __init__(self, downstream: web.Request, on_first: Callable[[bool], None]) -> None:
        self._downstream = downstream
        self._on_first = on_first
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has received something."""
        return self._response is not None

    async def send(self, engine: RoutedEngine, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Send the answer of an engine.

        Args:
            engine: The engine.
            upstream: Its answer, of which the headers have come.

        Raises:
            EngineLost: The engine failed before its first token; the client has received nothing.
            aiohttp.ClientError: The connection to the engine broke.
            ClientGone: The client has closed its connection.
        """
        headers = {name: upstream.headers[name] for name in _KEPT_HEADERS if name in upstream.headers}
        headers[_ENGINE] = engine.name
        headers.setdefault(REQUEST_ID_HEADER, self._downstream[REQUEST_ID])
        if not 200 <= upstream.status < 600:
            raise EngineLost(engine, f"answers {upstream.status}")
        if upstream.content_type != _STREAM or upstream.status != 200:
            answer = web.Response(status=upstream.status, body=await upstream.read(), headers=headers)
            if upstream.status >= 500 or upstream.status == _AGAIN_STATUS:
                raise AnswerRefused(engine, answer)
            engine.heard()
            self._on_first(False)
            return answer
        first = await _first_event(upstream)
        if not first:
            raise EngineLost(engine, "ended without an answer")
        if _status_of(first) >= 500:
            raise EngineLost(engine, "answers with an error event")
        self._on_first(True)
        self._response = response = web.StreamResponse(status=upstream.status, headers=headers)
        async with _of_client():
            await response.prepare(self._downstream)
            await response.write(first)
        async for piece in upstream.content.iter_any():
            engine.heard()
            async with _of_client():
                await response.write(piece)
        async with _of_client():
            await response.write_eof()
        return response

    async def break_off(self, engine: RoutedEngine, error: Exception) -> web.StreamResponse:
        """End an answer whose engine failed in the middle of it, by an error event."""
        response = self._response
        assert response is not None, "it has begun"
        logger().warning("engine failed in the middle of an answer", engine=engine.name, error=repr(error))
        event = RequestError(502, "the engine failed in the middle of its answer; send the request again").body()
        async with _of_client():
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write_eof()
        return response


@contextlib.asynccontextmanager
async def _of_client() -> AsyncIterator[None]:
    """Turn errors of the client's connection into `ClientGone`, apart from those of the engine's.

    A client that takes nothing for a minute counts as disconnected.
    """
    try:
        async with asyncio.timeout(IDLE_S):
            yield
    except (ConnectionError, aiohttp.ClientError, TimeoutError) as error:
        raise ClientGone from error


async def _first_event(upstream: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of a stream, with at least its first event."""
    first = bytearray()
    while len(first) < _EVENT_MAX and not any(end in first for end in _EVENT_ENDS):
        piece = await upstream.content.readany()
        if not piece:
            break
        first += piece
    return bytes(first)


def _status_of(beginning: bytes) -> int:
    """Return the code of an error that a stream begins with; 0 for none."""
    line = next((line for line in beginning.splitlines() if line.startswith(_DATA)), b"")
    try:
        error: Mapping[str, Any] = json.loads(line.removeprefix(_DATA))["error"]
        return int(error.get("code") or 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0
