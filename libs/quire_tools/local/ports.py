"""Ports for services that are about to start."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path
from typing import Final

from quire.model.errors import Unavailable

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST: Final = 12_000
_LAST: Final = 32_767
_TRIES: Final = 50


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing has bound. Raises `Unavailable` if there are none.

    They lie below those that the kernel gives to outgoing connections: one of these could take a port between its being
    found free and its being bound.
    """
    last = min(_LAST, _outgoing_from() - 1)
    pick = random.SystemRandom()
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for _ in range(count * _TRIES):
            if len(found) == count:
                return found
            each = stack.enter_context(socket.socket())
            port = pick.randint(_FIRST, last) if last > _FIRST else 0
            try:
                each.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            found.append(int(each.getsockname()[1]))
    if len(found) == count:
        return found
    raise Unavailable(f"no {count} ports of 127.0.0.1 are free")


def _outgoing_from() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST + 1
