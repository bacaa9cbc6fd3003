"""TLS between services and for clients; certificates are read again when their files change, without a restart."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from quire.model.errors import ConfigInvalid

MEMBER_NAME: Final = "member.quire.internal"
"""What every member's certificate is made out to: members are known by this name, not by where they run."""

SERVICES: Final = ("gateway", "orchestrator", "storage", "scheduler", "decoder")
OPERATOR: Final = "operator"
_LOOK_S: Final = 1.0


def name_of(holder: str) -> str:
    """Name in the certificate of a service, or of an operator, besides the members' name."""
    return f"{holder}.{MEMBER_NAME}"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files.

    `ca`: who signs the other side's certificate, None for the system's authorities; `cert` and `key`: one's own, None
    for none. `server_name`: whom to expect at the other end, "" for the address that was dialled.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def stamp(self) -> tuple[int, ...]:
        """Return a stamp that changes with a file. Raises `ConfigInvalid` for a file that is not there."""
        return tuple(_changed_ns(path) for path in (self.ca, self.cert, self.key) if path is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Load the files. Raises `ConfigInvalid` if they cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))

    def server_credentials(self, *, clients_too: bool) -> grpc.ServerCredentials:
        """`clients_too`: clients need a certificate of `ca`. Raises `ConfigInvalid`."""
        last = [self.stamp()]

        def fetch() -> Any:
            try:
                stamp = self.stamp()
                if stamp == last[0]:
                    return None
                configuration = self._certificates()
            except ConfigInvalid:
                return None  # half of a rotation: the old one serves until the new one is whole
            last[0] = stamp
            return configuration

        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._certificates(), fetch, require_client_authentication=clients_too
        )
        return credentials

    def _certificates(self) -> grpc.ServerCertificateConfiguration:
        pair: Any = [(_read(self.key), _read(self.cert))]
        configuration: grpc.ServerCertificateConfiguration = grpc.ssl_server_certificate_configuration(
            pair, _read(self.ca)
        )
        return configuration


def tls_of_environment(server_name: str = "") -> Tls | None:
    """Return the settings of QUIRE_CLIENT_CA, _CERT and _KEY; None without any."""
    files = [os.environ.get(f"QUIRE_CLIENT_{name}", "") for name in ("CA", "CERT", "KEY")]
    if not any(files):
        return None
    ca, cert, key = (Path(file) if file else None for file in files)
    return Tls(ca, cert, key, server_name)


class RotatingChannel:
    """A channel whose next calls go over another one when the certificates have changed. What stubs need of one."""

    def __init__(self, address: str, tls: Tls, options: list[tuple[str, Any]], interceptors: Any) -> None:
        self._address = address
        self._tls = tls
        self._interceptors = interceptors
        self._options = list(options)
        if tls.server_name:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        self._made: list[grpc.aio.Channel] = []
        self._stamp: tuple[int, ...] = ()
        self._looked_s = 0.0

    def now(self) -> grpc.aio.Channel:
        """Return the channel for the certificates of at most a second ago."""
        now_s = time.monotonic()
        if self._made and now_s - self._looked_s < _LOOK_S:
            return self._made[-1]
        self._looked_s = now_s
        try:
            stamp = self._tls.stamp()
            if stamp != self._stamp:
                credentials = self._tls.channel_credentials()
                self._made.append(
                    grpc.aio.secure_channel(
                        self._address, credentials, options=self._options, interceptors=self._interceptors
                    )
                )
                self._stamp = stamp
        except ConfigInvalid:
            if not self._made:
                raise
        return self._made[-1]

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Return a method that calls by the channel that is current then."""
        return self._method("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """Return a method that calls by the channel that is current then."""
        return self._method("unary_stream", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """Return a method that calls by the channel that is current then."""
        return self._method("stream_stream", arguments, options)

    def get_state(self, try_to_connect: bool = False) -> Any:
        """Return the state of the current channel."""
        return self.now().get_state(try_to_connect)

    async def wait_for_state_change(self, last: Any) -> None:
        """Wait until the state of the current channel is another than `last`."""
        await self.now().wait_for_state_change(last)

    async def close(self) -> None:
        """Close all channels, the replaced ones too."""
        for channel in self._made:
            await channel.close()

    def _method(self, kind: str, arguments: Any, options: Any) -> Any:
        methods: dict[int, Any] = {}

        def call(*request: Any, **context: Any) -> Any:
            channel = self.now()
            if id(channel) not in methods:
                methods.clear()
                methods[id(channel)] = getattr(channel, kind)(*arguments, **options)
            return methods[id(channel)](*request, **context)

        call._method = arguments[0]  # type: ignore[attr-defined]
        return call


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigInvalid(f"{path}: {error.strerror}") from None


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"{path}: {error.strerror}") from None
