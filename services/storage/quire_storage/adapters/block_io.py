"""Choice of a node's `BlockIO`: the configured one, or the better one that this machine offers."""

from __future__ import annotations

from quire.model.errors import ConfigInvalid
from quire.telemetry import logger
from quire_storage.adapters.threads import ThreadBlockIO
from quire_storage.adapters.uring import UringBlockIO
from quire_storage.errors import BlockIOUnavailable
from quire_storage.ports import BlockIO

_THREADS = 16


def choose_block_io(name: str, depth: int, *, direct: bool) -> BlockIO:
    """Open it. Raises `ConfigInvalid` for an unknown name, `BlockIOUnavailable` for one that does not run here."""
    if name not in ("auto", "io_uring", "threads"):
        raise ConfigInvalid(f"QUIRE_STORAGE_IO={name!r}: io_uring, threads or auto")
    if name == "threads":
        return ThreadBlockIO(_THREADS, direct=direct)
    try:
        _probe()
    except BlockIOUnavailable as error:
        if name == "io_uring":
            raise
        logger().warning("no io_uring on this machine, reading with threads", reason=str(error))
        return ThreadBlockIO(_THREADS, direct=direct)
    return UringBlockIO(depth, direct=direct)


def _probe() -> None:
    """Check io_uring. Raises `BlockIOUnavailable` if the kernel, or a container's seccomp profile, refuses it."""
    ring = UringBlockIO(1, direct=False)
    try:
        ring.init_queue([0], [])
    finally:
        ring.close()
