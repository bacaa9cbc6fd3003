"""Ports for services that are about to start."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

from quire.model.errors import Unavailable

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST: Final = 12_000
_LAST: Final = 32_767
_TRIES: Final = 50


def free_ports(count: int, *, but: Collection[int] = ()) -> list[int]:
    """Ports of 127.0.0.1 that nothing has bound, and none of `but`. Raises `Unavailable` if there are none.

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
            if port in but:
                continue
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


def remembered_ports(file: Path, count: int) -> list[int]:
    """The ports that `file` names, if there are as many and they are free; else others, which it names from then on."""
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(file.read_text())
        if isinstance(before, list) and len(before) == count and all(map(_is_free, before)):
            return before
    found = free_ports(count)
    file.write_text(json.dumps(found))
    return found


def _is_free(port: object) -> bool:
    with socket.socket() as each:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the cluster before may linger
        try:
            each.bind(("127.0.0.1", port))
        except (OSError, TypeError, OverflowError):
            return False
        return True


def _outgoing_from() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST + 1
