"""Bytes between registered memory of this process and of another, one piece at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from quire.client.memory.buffers import Buffer
from quire.client.memory.quarantine import Quarantine, may_be_in_use
from quire.model.descriptor import RdmaTarget
from quire.model.errors import ResourceExhausted, TargetInvalid
from quire.transport import Transport

_TIMEOUT_S: Final = 10.0


class PeerTransfers:
    """Pushes and pulls; lends memory for a peer to read or write."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._quarantine = Quarantine()

    async def push(self, data: bytes | memoryview, target: RdmaTarget) -> None:
        """Write bytes to a peer's memory. Raises `TargetInvalid`, `PeerLost`."""
        if len(data) > target.length:
            raise TargetInvalid(f"{target.length} bytes, but {len(data)} are needed", field="target")
        peer = self._transport.connect(target.worker_address)
        remote = await peer.remote(target)
        try:
            with self._lent(self._filled(data), target.worker_address) as buffer:
                stream = peer.stream(buffer.region, remote)
                await stream.send(0, len(data), 0)
                stream.announce(b"")
                await stream.drain(_TIMEOUT_S)
        finally:
            remote.close()

    async def pull(self, target: RdmaTarget, length: int) -> bytes:
        """Read bytes from a peer's memory. Raises `TargetInvalid`, `PeerLost`."""
        if length > target.length:
            raise TargetInvalid(f"{target.length} bytes, but {length} are asked for", field="target")
        peer = self._transport.connect(target.worker_address)
        remote = await peer.remote(target)
        try:
            with self._lent(Buffer.allocate(self._transport, length), target.worker_address) as buffer:
                await peer.get(buffer.region, 0, length, remote, 0, timeout_s=_TIMEOUT_S)
                assert buffer.view is not None, "host memory"
                return buffer.view[:length].tobytes()
        finally:
            remote.close()

    @contextlib.contextmanager
    def lend(self, data: bytes) -> Iterator[RdmaTarget]:
        """Lend a copy of bytes for a peer to read."""
        with self._lent(self._filled(data or b"\0")) as buffer:
            yield buffer.target()

    @contextlib.contextmanager
    def room(self, length: int) -> Iterator[tuple[RdmaTarget, memoryview]]:
        """Lend room for a peer to write to; yields its target and its bytes."""
        with self._lent(Buffer.allocate(self._transport, length)) as buffer:
            assert buffer.view is not None, "host memory"
            yield buffer.target(), memoryview(buffer.view.data)

    @contextlib.contextmanager
    def _lent(self, buffer: Buffer, peer: bytes = b"") -> Iterator[Buffer]:
        """Lend memory whose address a peer receives, or that is in flight.

        After a failure the peer may still use it.
        """
        try:
            self._quarantine.check(peer)
        except ResourceExhausted:
            buffer.close()
            raise
        try:
            yield buffer
        except BaseException as error:
            if may_be_in_use(error):
                self._quarantine.add(buffer, peer)
            else:
                buffer.close()
            raise
        buffer.close()

    def _filled(self, data: bytes | memoryview) -> Buffer:
        buffer = Buffer.allocate(self._transport, len(data))
        assert buffer.view is not None, "host memory"
        memoryview(buffer.view.data)[: len(data)] = data
        return buffer
