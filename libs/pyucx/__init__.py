"""asyncio binding of UCX: one-sided writes and reads of registered memory, and short active messages.

    async with Worker(context) as worker:
        endpoint = worker.connect(peer_address)
        remote = endpoint.remote_memory(address, length, remote_key)
        stream = endpoint.stream(memory, remote, message_id=1)
        await stream.send(0, memory.length, remote_offset=0)
        stream.announce(b"it is there")
        await stream.drain()

By cffi in ABI mode: nothing is compiled at install. Sockets of UCX lack close-on-exec: spawn child processes, do not
fork.
"""

from pyucx._library import Library, library
from pyucx.context import Context, Memory
from pyucx.endpoint import MESSAGE_BYTES_MAX, Endpoint, RemoteMemory
from pyucx.errors import (
    Closed,
    InvalidRemoteKey,
    LibraryNotFound,
    MessageTooLong,
    OperationFailed,
    OperationTimeout,
    PeerDied,
    TargetOutOfRange,
    UcxError,
)
from pyucx.selftest import gathers_correctly
from pyucx.stream import Stream
from pyucx.worker import Worker

__all__ = [
    "MESSAGE_BYTES_MAX",
    "Closed",
    "Context",
    "Endpoint",
    "InvalidRemoteKey",
    "Library",
    "LibraryNotFound",
    "Memory",
    "MessageTooLong",
    "OperationFailed",
    "OperationTimeout",
    "PeerDied",
    "RemoteMemory",
    "Stream",
    "TargetOutOfRange",
    "UcxError",
    "Worker",
    "gathers_correctly",
    "library",
]
