"""Workers of pytest-xdist, and suites that run side by side, start clusters at the same moments: each has ports of its
own.

A server of a Redis Cluster also listens 10,000 above its port: there is no range.
"""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
from pathlib import Path

_FIRST, _SLOTS, _PORTS = 12_000, 20, 500
_held: list[int] = []


@functools.cache
def ports() -> str:
    """A range that no other process of a suite has, until this one ends, as `QUIRE_LOCAL_PORTS` has it."""
    for slot in range(_SLOTS):
        file = Path(tempfile.gettempdir()) / f"quire-test-ports-{slot}"
        try:
            handle = os.open(file, os.O_RDONLY | (0 if file.exists() else os.O_CREAT), 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            continue
        _held.append(handle)
        return f"{_FIRST + slot * _PORTS}-{_FIRST + (slot + 1) * _PORTS - 1}"
    raise RuntimeError(f"{_SLOTS} processes of test suites run on this machine; let one end")
