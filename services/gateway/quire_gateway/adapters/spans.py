"""The spans that the members of the cluster keep in memory, asked for by an operator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

from quire.model.errors import QuireError
from quire.model.nodes import Node
from quire.wire.channels import ChannelPool, stream
from quire.wire.credentials import member_token
from quire.wire.v1 import trace_pb2
from quire.wire.v1.trace_pb2_grpc import TraceServiceStub
from quire_gateway.config import GatewayConfig
from quire_gateway.ports import MemberPage
from quire_server.service import member_tls

_AT_ONCE: Final = 16
_MEMBER_S: Final = 10.0


class GrpcClusterSpans:
    """Asks all members, and the orchestrators, which are no members. `nodes`: the members."""

    def __init__(self, config: GatewayConfig, nodes: Callable[[], Awaitable[Sequence[Node]]]) -> None:
        self._config = config
        self._nodes = nodes

    async def of(self, trace_id: str) -> AsyncGenerator[MemberPage, None]:
        """Page by page, as they come."""
        addresses = {address.strip(): address.strip() for address in self._config.orchestrator_address.split(",")}
        addresses |= {node.grpc_address: node.node_id for node in await self._nodes()}
        channels = ChannelPool(member_tls(self._config), member_token(self._config.cluster_secret))
        pages: asyncio.Queue[MemberPage | None] = asyncio.Queue(_AT_ONCE)
        asking = asyncio.create_task(self._ask_all(channels, addresses, trace_id, pages))
        try:
            while (page := await pages.get()) is not None:
                yield page
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await channels.close()

    async def _ask_all(
        self, channels: ChannelPool, addresses: dict[str, str], trace_id: str, pages: asyncio.Queue[MemberPage | None]
    ) -> None:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def ask(address: str, member: str) -> None:
            stub: TraceServiceStub = TraceServiceStub(channels.get(address))
            request = trace_pb2.ListSpansRequest(trace_id=trace_id)
            async with turns:
                try:
                    async with contextlib.aclosing(stream(stub.ListSpans, request, timeout_s=_MEMBER_S)) as told:
                        async for each in told:
                            await pages.put(MemberPage(member, each.spans))
                except QuireError as error:
                    await pages.put(MemberPage(member, error=str(error)))

        async with asyncio.TaskGroup() as group:
            for address, member in addresses.items():
                group.create_task(ask(address, member))
        await pages.put(None)
