"""Storage nodes over gRPC."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from quire.model.durability import Durability
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.wire import convert
from quire.wire.channels import ChannelPool, call
from quire.wire.v1 import storage_pb2 as pb
from quire.wire.v1.storage_pb2_grpc import StorageServiceStub

_TIMEOUT_S = 5.0
_RAISE_TIMEOUT_S = 60.0


class GrpcChunkHolder:
    """The `ChunkHolder` port."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def drop(self, node: Node, generations: Mapping[bytes, int]) -> int:
        stub: StorageServiceStub = StorageServiceStub(self._channels.get(node.grpc_address))
        request = pb.DropRequest(chunk_keys=b"".join(generations), generations=generations.values())
        response = await call(stub.Drop, request, timeout_s=_TIMEOUT_S)
        return int(response.dropped_chunks)

    async def delete_objects(self, node: Node, keys: ChunkKeys, until_ms: int) -> None:
        stub: StorageServiceStub = StorageServiceStub(self._channels.get(node.grpc_address))
        request = pb.DeleteObjectsRequest(chunk_keys=keys.packed, until_ms=until_ms)
        await call(stub.DeleteObjects, request, timeout_s=_RAISE_TIMEOUT_S, again=False)

    async def raise_level(self, node: Node, keys: ChunkKeys, durability: Durability) -> list[bool]:
        stub: StorageServiceStub = StorageServiceStub(self._channels.get(node.grpc_address))
        request = pb.RaiseRequest(chunk_keys=keys.packed, durability=convert.durability_to(durability))
        response = await call(stub.Raise, request, timeout_s=_RAISE_TIMEOUT_S)
        return [bool(mark) for mark in response.raised]

    async def gone(self, node: Node) -> None:
        channel = self._channels.get(node.grpc_address)
        broken = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
        was_ready = False
        while True:
            state = channel.get_state(try_to_connect=True)
            # A connection that was merely idle comes up again; one whose process is dead is refused.
            if was_ready and state in broken:
                return
            was_ready = was_ready or state is grpc.ChannelConnectivity.READY
            await channel.wait_for_state_change(state)
