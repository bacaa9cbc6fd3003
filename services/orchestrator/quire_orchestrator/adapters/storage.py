"""Storage nodes over gRPC."""

from __future__ import annotations

from quire.keys import ChunkKeys
from quire.nodes import Node
from quire.rpc.channels import ChannelPool, call
from quire.v1 import storage_pb2 as pb
from quire.v1.storage_pb2_grpc import StorageServiceStub

_TIMEOUT_S = 5.0


class GrpcChunkHolder:
    """The `ChunkHolder` port."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def drop(self, node: Node, keys: ChunkKeys) -> int:
        stub: StorageServiceStub = StorageServiceStub(self._channels.get(node.grpc_address))
        response = await call(stub.Drop, pb.DropRequest(chunk_keys=keys.packed), timeout_s=_TIMEOUT_S)
        return int(response.dropped_chunks)
