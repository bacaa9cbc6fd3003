"""The chunk store, other decoders, and bytes between registered memory."""

from __future__ import annotations

from quire.client import ImageClient, QuireClient
from quire.model.descriptor import RdmaTarget
from quire.model.images import ImageEntry
from quire.wire import convert
from quire.wire.channels import ChannelPool, call
from quire.wire.v1 import common_pb2, decoder_pb2
from quire.wire.v1.decoder_pb2_grpc import DecoderServiceStub

_TIMEOUT_S = 10.0


class StoredRecords:
    """The `RecordSource` port: one request to the gateway, the bytes by UCX from the storage node."""

    def __init__(self, client: QuireClient) -> None:
        self._images = ImageClient(client)

    async def fetch(self, entry: ImageEntry) -> bytes:
        return await self._images.get_record_of(entry)


class GrpcOwners:
    """The `Owner` port."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def read_cached(self, address: str, entry: ImageEntry, target: RdmaTarget) -> tuple[str, int]:
        request = decoder_pb2.ReadCachedRequest(entry=convert.image_to(entry), target=convert.target_to(target))
        response = await call(self._stub(address).ReadCached, request, timeout_s=_TIMEOUT_S, again=False)
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
        await call(self._stub(address).WriteBack, request, timeout_s=_TIMEOUT_S, again=False)

    def _stub(self, address: str) -> DecoderServiceStub:
        stub: DecoderServiceStub = DecoderServiceStub(self._channels.get(address))
        return stub


def _target(lent: tuple[RdmaTarget, int] | None) -> common_pb2.RdmaTarget | None:
    return convert.target_to(lent[0]) if lent else None
