"""Bounds on the connections of listeners: strangers who only connect must leave descriptors for those who ask."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

from aiohttp import web

from quire.model.errors import ConfigInvalid

KEEPALIVE_S: Final = 75.0
"""For how long a connection stays open without a complete request."""
HANDSHAKE_S: Final = 10.0
"""In which a client has to complete its TLS handshake."""
GRPC_SHARE: Final = 0.25
HTTP_SHARE: Final = 0.2
ASIDE_SHARE: Final = 0.02
"""Parts of the process' descriptors: a gRPC server's, an HTTP frontend's, a listener's for probes or operators."""
_CONNECTIONS_MIN: Final = 16


def connections_max(share: float) -> int:
    """Return how many connections a listener may have whose part of the descriptors is `share`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_CONNECTIONS_MIN, int(share * soft))


class HttpConnections:
    """The connections of one HTTP server. A newcomer beyond the bound replaces the oldest one that never had a request,
    else the one whose last request is longest ago; it is refused where all are being served.
    """

    def __init__(self, bound: Callable[[], int]) -> None:
        self._bound = bound
        self._silent: dict[Any, None] = {}
        self._idle: dict[Any, None] = {}
        self._served: set[Any] = set()

    def watch(self, server: web.Server) -> None:
        """Bound the server's connections from now on."""
        on_made, on_lost = server.connection_made, server.connection_lost

        def connection_made(handler: Any, transport: asyncio.Transport) -> None:
            on_made(handler, transport)
            if len(self._silent) + len(self._idle) + len(self._served) >= self._bound():
                next(chain(self._silent, self._idle, [handler])).force_close()
            self._silent[handler] = None

        def connection_lost(handler: Any, error: BaseException | None = None) -> None:
            self._silent.pop(handler, None)
            self._idle.pop(handler, None)
            self._served.discard(handler)
            on_lost(handler, error)

        vars(server).update(connection_made=connection_made, connection_lost=connection_lost)

    @contextlib.contextmanager
    def serving(self, request: web.BaseRequest) -> Iterator[None]:
        """While a request is being answered, its connection stays."""
        handler = request.protocol
        self._silent.pop(handler, None)
        self._idle.pop(handler, None)
        self._served.add(handler)
        try:
            yield
        finally:
            self._served.discard(handler)
            if request.transport is not None:
                self._idle[handler] = None


class _Site(web.TCPSite):
    """A listener with a deadline for handshakes, which aiohttp leaves at a minute."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        tls: dict[str, Any] = {"ssl": self._ssl_context, "ssl_handshake_timeout": HANDSHAKE_S}
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_server(
            server, self._host, self._port, backlog=self._backlog, **(tls if self._ssl_context else {})
        )


async def listen(
    runner: web.BaseRunner, address: str, connections: HttpConnections, context: ssl.SSLContext | None = None
) -> None:
    """Listen at host:port once the runner is set up. Raises `ConfigInvalid` for an invalid or used address."""
    host, _, port = address.rpartition(":")
    server = runner.server
    assert isinstance(server, web.Server)
    if "connection_made" not in vars(server):
        connections.watch(server)
    try:
        await _Site(runner, host or None, int(port), ssl_context=context, backlog=1024).start()
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"cannot listen on {address!r}: {error}") from None
