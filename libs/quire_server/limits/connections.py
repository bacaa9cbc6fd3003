"""Bounds on the connections of listeners, so that connections without requests leave descriptors to the others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, cast

from aiohttp import web

from quire.model.errors import ConfigInvalid
from quire.wire.addresses import host_and_port
from quire_server.malformed_requests import MalformedAnswer, protocol_answering, protocols_of

KEEPALIVE_S: Final = 75.0
"""For how long a connection stays open without a complete request."""
HANDSHAKE_S: Final = 10.0
"""In which a client has to complete its TLS handshake."""
LISTENER_SHARE: Final = 0.2
ASIDE_SHARE: Final = 0.02
"""Parts of the process' descriptors: of a listener for clients or members, and of one for probes or operators."""
_CONNECTIONS_MIN: Final = 16
_BACKLOG: Final = 1024
_ACCEPTED_AT_ONCE: Final = 100
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ABSENT: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_PAUSE_S: Final = 0.1


def connections_max(share: float) -> int:
    """Return how many connections a listener may have whose part of the descriptors is `share`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_CONNECTIONS_MIN, int(share * soft))


class HttpConnections:
    """The connections of one HTTP server, those in a TLS handshake too.

    A newcomer beyond the bound replaces the oldest one that never had a request, else the one whose last request is
    longest ago, else the oldest handshake; it is refused where all are being served.
    """

    def __init__(self, bound: Callable[[], int], malformed: MalformedAnswer | None = None) -> None:
        """`malformed`: makes answers to requests that cannot be parsed; None for plain text."""
        self._bound = bound
        self._protocol = protocol_answering(malformed) if malformed is not None else None
        self._handshakes: dict[asyncio.Task[Any], None] = {}
        self._transports: dict[Any, asyncio.Transport] = {}
        self._silent: dict[Any, None] = {}
        self._idle: dict[Any, None] = {}
        self._closing: dict[Any, None] = {}

    def __len__(self) -> int:
        return len(self._handshakes) + len(self._transports)

    def watch(self, server: web.Server) -> None:
        """Follow the server's connections from now on."""
        on_made, on_lost = server.connection_made, server.connection_lost

        def connection_made(handler: Any, transport: asyncio.Transport) -> None:
            on_made(handler, transport)
            self._transports[handler] = transport
            self._silent[handler] = None

        def connection_lost(handler: Any, error: BaseException | None = None) -> None:
            for kind in (self._transports, self._silent, self._idle, self._closing):
                kind.pop(handler, None)
            on_lost(handler, error)

        vars(server).update(connection_made=connection_made, connection_lost=connection_lost)

    def admit(self, connection: socket.socket, server: web.Server, context: ssl.SSLContext | None) -> None:
        """Serve an accepted connection, or close it where there is no room."""
        if len(self) >= self._bound() and not self._make_room():
            connection.close()
            return
        tls: dict[str, Any] = {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S} if context is not None else {}
        connecting = asyncio.get_running_loop().connect_accepted_socket(
            protocols_of(server, self._protocol), connection, **tls
        )
        handshake = asyncio.ensure_future(connecting)
        self._handshakes[handshake] = None
        handshake.add_done_callback(self._shaken)

    def _shaken(self, handshake: asyncio.Task[Any]) -> None:
        self._handshakes.pop(handshake, None)
        if not handshake.cancelled():
            handshake.exception()  # the client's fault, which no log needs

    def _make_room(self) -> bool:
        """Close a connection, or abort one that was closed for an earlier newcomer and lingers."""
        if self._closing:
            handler = next(iter(self._closing))
            del self._closing[handler]
            self._transports.pop(handler).abort()
        if self._silent:
            handler = next(iter(self._silent))
            del self._silent[handler]
            self._transports.pop(handler).abort()
        elif self._idle:
            handler = next(iter(self._idle))
            del self._idle[handler]
            self._closing[handler] = None
            handler.force_close()
        elif self._handshakes:
            handshake = next(iter(self._handshakes))
            del self._handshakes[handshake]
            handshake.cancel()
        else:
            return len(self) < self._bound()
        return True

    @contextlib.contextmanager
    def serving(self, request: web.BaseRequest) -> Iterator[None]:
        """While a request is being answered, its connection stays."""
        handler = request.protocol
        self._silent.pop(handler, None)
        self._idle.pop(handler, None)
        try:
            yield
        finally:
            if handler in self._transports and handler not in self._closing:
                self._idle[handler] = None


class _Listener:
    """Listening sockets, with the part of `asyncio.Server` that aiohttp calls."""

    def __init__(self, sockets: Sequence[socket.socket], admit: Callable[[socket.socket], None]) -> None:
        self.sockets = sockets
        self._admit = admit
        for listening in sockets:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)

    def close(self) -> None:
        for listening in self.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
            listening.close()
        self.sockets = []

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:  # it stays readable: another look at once would take the whole core
                    self._pause(listening)
                return
            connection.setblocking(False)
            self._admit(connection)

    def _pause(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening.fileno())
        loop.call_later(_PAUSE_S, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)


def _listening(places: Sequence[tuple[int, Any]]) -> list[socket.socket]:
    """Listen at all of the places, but for families of addresses that this host does not have.

    At `[::]` alone both families are served, as gRPC does. Raises `OSError`.
    """
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    for family, place in places:
        try:
            alone = len(places) == 1 and (family, place[0]) == (socket.AF_INET6, "::")
            dualstack = alone and socket.has_dualstack_ipv6()
            listening = socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=dualstack)
        except OSError as error:
            if error.errno in _ABSENT:
                absent = error
                continue
            for opened in sockets:
                opened.close()
            raise
        listening.setblocking(False)
        sockets.append(listening)
    if absent is not None and not sockets:
        raise absent
    return sockets


class _Site(web.BaseSite):
    """A listener whose connections are bounded from their first packet on."""

    def __init__(
        self, runner: web.BaseRunner, address: str, connections: HttpConnections, context: ssl.SSLContext | None
    ) -> None:
        super().__init__(runner, ssl_context=context)
        self._address = address
        self._connections = connections

    @property
    def name(self) -> str:
        return f"{'https' if self._ssl_context else 'http'}://{self._address}"

    async def start(self) -> None:
        """Listen. Raises `OSError`, `ValueError` for an invalid or used address."""
        await super().start()
        host, port = host_and_port(self._address)
        places = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sockets = _listening([(family, place[:2]) for family, *_, place in dict.fromkeys(places)])
        server = self._runner.server
        assert isinstance(server, web.Server)
        admit = partial(self._connections.admit, server=server, context=self._ssl_context)
        self._server = cast(Any, _Listener(sockets, admit))


async def listen(
    runner: web.BaseRunner, address: str, connections: HttpConnections, context: ssl.SSLContext | None = None
) -> None:
    """Listen at host:port once the runner is set up. Raises `ConfigInvalid` for an invalid or used address."""
    server = runner.server
    assert isinstance(server, web.Server)
    if "connection_made" not in vars(server):
        connections.watch(server)
    try:
        await _Site(runner, address, connections, context).start()
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"cannot listen on {address!r}: {error}") from None
