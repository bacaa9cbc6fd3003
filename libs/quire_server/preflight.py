"""Checks of a configuration that need the machine: free addresses, writable folders, the Redis URL."""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
from pathlib import Path
from typing import Any, Final

from quire.model.errors import ConfigInvalid
from quire.wire.addresses import host_and_port
from quire_server.config import variable_name

_RDMA: Final = ("rc", "ud", "dc", "ib")
"""How the names of UCX's transports begin that need pinned memory."""
_CAP_IPC_LOCK: Final = 14


def preflight(config: Any, prefix: str) -> list[str]:
    """Problems, each with its variable, its value and why. Nothing is left behind."""
    problems = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), variable_name(prefix, field)
        if field.name.endswith("listen") and value:
            problems += _taken(name, value)
        elif field.metadata.get("folders"):
            folders = [folder.strip() for folder in str(value).split(",") if folder.strip()]
            problems += [problem for folder in folders for problem in _unwritable(name, folder)]
        elif field.name == "redis_url" and value:
            problems += _no_redis(name, value)
        elif field.name == "arena_bytes":
            problems += _not_pinned(name, value, config.ucx_tls or os.environ.get("UCX_TLS", ""))
    return problems


def _not_pinned(name: str, arena_bytes: int, ucx_tls: str) -> list[str]:
    """Check the limit of pinned memory: RDMA, if it is named, pins the whole arena. `CAP_IPC_LOCK` lifts the limit."""
    if ucx_tls.startswith("^") or not any(transport.strip().startswith(_RDMA) for transport in ucx_tls.split(",")):
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= arena_bytes or _may_lock():
        return []
    return [
        f"{name}={arena_bytes}: UCX_TLS={ucx_tls} pins that much memory, and this process may pin {soft} bytes; raise "
        "the limit (ulimit -l unlimited, LimitMEMLOCK=infinity of the service or of the container runtime)"
    ]


def _may_lock() -> bool:
    status = Path("/proc/self/status").read_text()
    (effective,) = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def _taken(name: str, address: str) -> list[str]:
    host, port = host_and_port(address)
    try:
        resolved = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(resolved[0], socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(resolved[4])
    except OSError as error:
        return [f"{name}={address!r}: cannot listen there: {error.strerror or error}"]
    return []


def _unwritable(name: str, folder: str) -> list[str]:
    """A folder that is not there is made where the one above can be written to."""
    if "://" in folder:
        return []
    path = Path(folder).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        return [f"{name}={folder!r}: {path} is no folder"]
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True) or os.statvfs(path).f_flag & os.ST_RDONLY:
        return [f"{name}={folder!r}: {path} cannot be written to"]
    return []


def _no_redis(name: str, url: str) -> list[str]:
    from quire_server.redis import connect

    try:
        connect(url)
    except ConfigInvalid as error:
        return [f"{name}: {error.message}"]
    return []
