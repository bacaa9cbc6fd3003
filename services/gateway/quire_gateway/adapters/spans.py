"""The spans that the members of the cluster keep in memory, asked for by an operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

from quire.model.errors import QuireError
from quire.model.nodes import MemberSpans, Node
from quire.wire.channels import ChannelPool, heard, stream
from quire.wire.credentials import spans_token
from quire.wire.v1 import trace_pb2
from quire.wire.v1.trace_pb2_grpc import TraceServiceStub
from quire_gateway.config import GatewayConfig
from quire_server.service import member_tls

_AT_ONCE: Final = 16
_SILENCE_S: Final = 5.0


class GrpcClusterSpans:
    """Asks all members, and the orchestrators, which are not members. `nodes`: the members."""

    def __init__(self, config: GatewayConfig, nodes: Callable[[], Awaitable[Sequence[Node]]]) -> None:
        self._config = config
        self._nodes = nodes

    async def of(self, trace_id: str) -> AsyncGenerator[MemberSpans, None]:
        """Ask some members at a time, each as it answers: spans of only these are held here."""
        orchestrators = [address.strip() for address in self._config.orchestrator_address.split(",")]
        sources = [(address, f"orchestrator at {address}") for address in orchestrators]
        sources += [(node.grpc_address, node.node_id) for node in await self._nodes()]
        channels = ChannelPool(member_tls(self._config), spans_token(self._config.secrets[0]))
        try:
            for first in range(0, len(sources), _AT_ONCE):
                batch = sources[first : first + _AT_ONCE]
                tasks = [asyncio.create_task(_ask(channels, address, name, trace_id)) for address, name in batch]
                try:
                    for answered in asyncio.as_completed(tasks):
                        for page in await answered:
                            yield page
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await channels.close()


async def _ask(channels: ChannelPool, address: str, member: str, trace_id: str) -> list[MemberSpans]:
    stub: TraceServiceStub = TraceServiceStub(channels.get(address))
    responses = stream(stub.ListSpans, trace_pb2.ListSpansRequest(trace_id=trace_id), timeout_s=None)
    pages: list[MemberSpans] = []
    try:
        async for page in heard(responses, _SILENCE_S, "it"):
            pages.append(MemberSpans(member, tuple(page.spans)))  # noqa: PERF401 (what came before an error is kept)
    except QuireError as error:
        pages.append(MemberSpans(member, error=str(error)))
    return pages
