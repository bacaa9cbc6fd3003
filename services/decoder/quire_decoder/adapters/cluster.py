"""The chunk store, other decoders, and bytes between registered memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from quire.client import Buffer, ImageClient, QuireClient
from quire.client.held import HeldBuffers
from quire.descriptor import RdmaTarget
from quire.errors import ResourceExhausted, TargetInvalid
from quire.images import ImageEntry
from quire.rpc import convert
from quire.rpc.channels import ChannelPool, call
from quire.transport import Transport
from quire.v1 import common_pb2, decoder_pb2
from quire.v1.decoder_pb2_grpc import DecoderServiceStub

_TIMEOUT_S = 10.0


class StoredRecords:
    """The `RecordSource` port: one request to the gateway, the bytes by UCX from the storage node."""

    def __init__(self, client: QuireClient) -> None:
        self._images = ImageClient(client)

    async def fetch(self, entry: ImageEntry) -> bytes:
        return await self._images.get_record_of(entry)


class UcxExchange:
    """The `Exchange` port."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held = HeldBuffers()

    async def push(self, data: bytes | memoryview, target: RdmaTarget) -> None:
        if len(data) > target.length:
            raise TargetInvalid(f"{target.length} bytes, but {len(data)} are needed", field="target")
        with self._lent(self._filled(data)) as buffer:
            peer = self._transport.connect(target.worker_address)
            remote = peer.remote(target)
            try:
                stream = peer.stream(buffer.region, remote)
                await stream.send(0, len(data), 0)
                stream.announce(b"")
                await stream.drain(_TIMEOUT_S)
            finally:
                remote.close()

    async def pull(self, target: RdmaTarget, length: int) -> bytes:
        if length > target.length:
            raise TargetInvalid(f"{target.length} bytes, but {length} are asked for", field="target")
        with self._lent(Buffer.allocate(self._transport, length)) as buffer:
            peer = self._transport.connect(target.worker_address)
            remote = peer.remote(target)
            try:
                await peer.get(buffer.region, 0, length, remote, 0, timeout_s=_TIMEOUT_S)
            finally:
                remote.close()
            assert buffer.view is not None, "host memory"
            return buffer.view[:length].tobytes()

    @contextlib.contextmanager
    def lend(self, data: bytes) -> Iterator[RdmaTarget]:
        with self._lent(self._filled(data or b"\0")) as buffer:
            yield buffer.target()

    @contextlib.contextmanager
    def room(self, length: int) -> Iterator[tuple[RdmaTarget, memoryview]]:
        with self._lent(Buffer.allocate(self._transport, length)) as buffer:
            assert buffer.view is not None, "host memory"
            yield buffer.target(), memoryview(buffer.view.data)

    @contextlib.contextmanager
    def _lent(self, buffer: Buffer) -> Iterator[Buffer]:
        """Memory that a peer was told of, or that is in flight. If that failed somebody may still be at it."""
        try:
            self._held.check()
        except ResourceExhausted:
            buffer.close()
            raise
        try:
            yield buffer
        except BaseException:
            self._held.hold(buffer)
            raise
        buffer.close()

    def _filled(self, data: bytes | memoryview) -> Buffer:
        buffer = Buffer.allocate(self._transport, len(data))
        assert buffer.view is not None, "host memory"
        memoryview(buffer.view.data)[: len(data)] = data
        return buffer


class GrpcOwners:
    """The `Owner` port."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def read_cached(self, address: str, entry: ImageEntry, target: RdmaTarget) -> tuple[str, int]:
        request = decoder_pb2.ReadCachedRequest(entry=convert.image_to(entry), target=convert.target_to(target))
        response = await call(self._stub(address).ReadCached, request, timeout_s=_TIMEOUT_S)
        return response.kind, response.length

    async def write_back(
        self,
        address: str,
        entry: ImageEntry,
        record: tuple[RdmaTarget, int] | None,
        image: tuple[RdmaTarget, int] | None,
    ) -> None:
        request = decoder_pb2.WriteBackRequest(
            entry=convert.image_to(entry),
            record=_target(record),
            record_length=record[1] if record else 0,
            image=_target(image),
            image_length=image[1] if image else 0,
        )
        await call(self._stub(address).WriteBack, request, timeout_s=_TIMEOUT_S)

    def _stub(self, address: str) -> DecoderServiceStub:
        stub: DecoderServiceStub = DecoderServiceStub(self._channels.get(address))
        return stub


def _target(lent: tuple[RdmaTarget, int] | None) -> common_pb2.RdmaTarget | None:
    return convert.target_to(lent[0]) if lent else None
