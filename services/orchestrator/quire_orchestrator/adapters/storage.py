"""Storage nodes over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from quire.model.durability import Durability
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.permit import PermitSigner
from quire.wire import convert
from quire.wire.channels import ChannelPool, call
from quire.wire.v1 import storage_pb2 as pb
from quire.wire.v1.storage_pb2_grpc import StorageServiceStub
from quire_server.access.permits import member_permit
from quire_server.clock import Clock

_TIMEOUT_S = 5.0
_RAISE_TIMEOUT_S = 60.0


class GrpcChunkHolder:
    """The `ChunkHolder` port."""

    def __init__(self, channels: ChannelPool, permits: PermitSigner, clock: Clock) -> None:
        self._channels = channels
        self._permits = permits
        self._clock = clock

    async def drop(self, node: Node, generations: Mapping[bytes, int]) -> int:
        request = pb.DropRequest(
            chunk_keys=b"".join(generations),
            generations=generations.values(),
            node_id=node.node_id,
            incarnation=node.incarnation,
        )
        response = await call(self._asked(node, request).Drop, request, timeout_s=_TIMEOUT_S)
        return int(response.dropped_chunks)

    async def delete_objects(self, node: Node, keys: ChunkKeys, until_ms: int) -> None:
        request = pb.DeleteObjectsRequest(chunk_keys=keys.packed, until_ms=until_ms)
        await call(self._asked(node, request).DeleteObjects, request, timeout_s=_RAISE_TIMEOUT_S, again=False)

    async def is_current(self, node: Node, epoch: str, changes: int) -> bool:
        request = pb.CompareIndexRequest(index_epoch=epoch, changes=changes)
        response = await call(self._asked(node, request).CompareIndex, request, timeout_s=_TIMEOUT_S)
        return bool(response.current)

    async def raise_level(self, node: Node, keys: ChunkKeys, durability: Durability) -> list[bool]:
        request = pb.RaiseRequest(chunk_keys=keys.packed, durability=convert.durability_to(durability))
        response = await call(self._asked(node, request).Raise, request, timeout_s=_RAISE_TIMEOUT_S)
        return [bool(mark) for mark in response.raised]

    async def give_up(self, node: Node, keys: ChunkKeys) -> list[bool]:
        request = pb.GiveUpRequest(chunk_keys=keys.packed)
        response = await call(self._asked(node, request).GiveUp, request, timeout_s=_RAISE_TIMEOUT_S)
        return [bool(mark) for mark in response.gone]

    def _asked(self, node: Node, request: Any) -> StorageServiceStub:
        """Sign a request and return the stub of the node that it goes to."""
        member_permit(self._permits, request, self._clock.now_ms())
        stub: StorageServiceStub = self._channels.stub(StorageServiceStub, node.grpc_address)
        return stub

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
