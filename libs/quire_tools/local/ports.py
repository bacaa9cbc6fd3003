"""Ports for services that are about to start."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import socket
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from quire.model.errors import ConfigInvalid, Unavailable

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_VARIABLE: Final = "QUIRE_LOCAL_PORTS"
_DEFAULT: Final = "12000-32767"
_TRIES: Final = 50
_GIVEN_MAX: Final = 200
_GIVEN: Final[deque[int]] = deque(maxlen=_GIVEN_MAX)
"""The last ones. What they were given for may not have bound them yet."""


USUAL: Final = {"gateway": 7410, "http": 7480, "s3": 7481}
"""Ports of a gateway by default: gRPC, images, S3."""


class GatewayPorts:
    """Ports of a cluster's first gateway.

    Attributes:
        moved: By the usual port that was taken, the one in its place.
    """

    def __init__(self, gateway_port: int, *, usual: bool) -> None:
        """`gateway_port`: requested for gRPC; 0 for none. `usual`: the others are `USUAL`, where they are free."""
        self._gateway_port = gateway_port
        self._usual = USUAL if usual else {}
        self.moved: dict[int, int] = {}

    def choose(self, name: str, port: int, requested: Collection[int] = ()) -> int:
        """Return the port of "gateway", "http" or "s3".

        Args:
            name: One of `USUAL`.
            port: A free one, in place of one that is taken.
            requested: Ports that others were given by their numbers.

        Raises:
            ConfigInvalid: The requested port is taken.
        """
        if name == "gateway" and self._gateway_port:
            if not is_free(self._gateway_port):
                raise ConfigInvalid(f"port {self._gateway_port} is taken", field="port")
            return self._gateway_port
        usual = self._usual.get(name)
        if usual is None:
            return port
        if is_free(usual) and usual not in {self._gateway_port, *requested}:
            return usual
        self.moved[usual] = port
        return port

    def choose_frontends(self, http: int, s3: int, requested: Collection[int]) -> tuple[int, int]:
        """Return the ports of images and of S3. `requested`: that of images, if it was requested. See `choose`."""
        return self.choose("http", http) if not requested else http, self.choose("s3", s3, requested)


def free_ports(count: int, *, but: Collection[int] = ()) -> list[int]:
    """Ports of 127.0.0.1 that nothing has bound, none of `but`, and none that was given lately, where there are many.

    Raises `Unavailable` if there are none.

    They are in the range `QUIRE_LOCAL_PORTS`: clusters that start at the same moment have ranges of their own, or could
    be given the same one.

    And they lie below those that the kernel gives to outgoing connections: one of these could take a port between its
    being found free and its being bound.
    """
    first, last = _range()
    last = min(last, _outgoing_from() - 1)
    pick = random.SystemRandom()
    taken = set(_GIVEN) if last - first > 2 * _GIVEN_MAX else set()
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for _ in range(count * _TRIES):
            if len(ports) == count:
                break
            socket_ = stack.enter_context(socket.socket())
            port = pick.randint(first, last) if last > first else 0
            if port in but or port in taken:
                continue
            try:
                socket_.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            ports.append(int(socket_.getsockname()[1]))
    if len(ports) == count:
        _GIVEN.extend(ports)
        return ports
    raise Unavailable(f"no {count} ports of 127.0.0.1 are free")


def usual() -> bool:
    """Whether a cluster takes the ports that gateways have by default: not where a range was named."""
    return not os.environ.get(_VARIABLE, "")


def named_ports(texts: Iterable[str]) -> set[int]:
    """Return the ports of the addresses in `texts`."""
    return {int(port) for text in texts for port in re.findall(r":(\d{1,5})\b", text)}


def remembered_ports(file: Path, count: int, *, but: Collection[int] = ()) -> list[int]:
    """Return the ports that `file` names, if they are as many, free, and none of `but`; else new ones.

    The file names these from then on.
    """
    with contextlib.suppress(OSError, ValueError):
        previous = json.loads(file.read_text())
        if (
            isinstance(previous, list)
            and len(previous) == count
            and all(map(is_free, previous))
            and not {*previous} & {*but}
        ):
            return previous
    ports = free_ports(count, but=but)
    file.write_text(json.dumps(ports))
    return ports


def is_free(port: object) -> bool:
    """Whether nothing listens there, on 127.0.0.1."""
    with socket.socket() as socket_:
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the cluster before may linger
        try:
            socket_.bind(("127.0.0.1", port))
        except (OSError, TypeError, OverflowError):
            return False
        return True


def _range() -> tuple[int, int]:
    text = os.environ.get(_VARIABLE, "") or _DEFAULT
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
        raise ConfigInvalid(f"{_VARIABLE}={text!r}: two ports are wanted, as in {_DEFAULT}")
    return int(first), int(last)


def _outgoing_from() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
