"""Membership from a node's side: announce, keep announcing, leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.model.errors import NameTaken, QuireError, VersionUnsupported
from quire.model.index import Listing
from quire.model.nodes import Node
from quire.telemetry import background, logger
from quire.wire.channels import ChannelPool, call
from quire.wire.convert import node_to
from quire.wire.v1 import orchestrator_pb2 as pb
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

_TIMEOUT_S = 2.0
_RETRY_S = 0.3


@dataclass(frozen=True, slots=True)
class ClusterNews:
    """The name of the index, another one if it was lost; the cluster's threshold Θ, 0 for none; what the index lists
    for this node; and, if this node is to register what lies in the object tier, by what name it reports that.
    """

    index_epoch: str
    theta_bytes: int = 0
    listing: Listing = field(default_factory=Listing)
    rebuild: str = ""


class Heartbeat:
    """Announces `describe()` to the orchestrator at the interval that it asks for.

    `on_news` hears what every answer says of the cluster.
    """

    def __init__(
        self,
        channels: ChannelPool,
        orchestrator_address: str,
        describe: Callable[[], Node],
        on_news: Callable[[ClusterNews], None] = lambda news: None,
    ) -> None:
        self._stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(orchestrator_address))
        self._describe = describe
        self._on_news = on_news
        self._task: asyncio.Task[None] | None = None
        self._joined = asyncio.Event()

    def start(self) -> None:
        """Begin; an orchestrator that is not there yet is waited for."""
        self._task = asyncio.create_task(self._run(), context=background())

    async def joined(self) -> None:
        """Return once the cluster knows this node."""
        await self._joined.wait()

    async def leave(self) -> None:
        """Stop announcing, and deregister if the orchestrator answers."""
        if self._task is not None:
            self._task.cancel()
        node = self._describe()
        request = pb.LeaveRequest(node_id=node.node_id, incarnation=node.incarnation)
        try:
            await call(self._stub.Leave, request, timeout_s=_TIMEOUT_S)
        except QuireError as error:
            logger().warning("could not leave", error=str(error))

    async def _run(self) -> None:
        failing = False
        while True:
            request = pb.HeartbeatRequest(node=node_to(self._describe()))
            try:
                response = await call(self._stub.Heartbeat, request, timeout_s=_TIMEOUT_S)
            except QuireError as error:
                if not failing and isinstance(error, VersionUnsupported | NameTaken):
                    logger().error("the cluster does not use this node", error=str(error))
                elif not failing:
                    logger().warning("the orchestrator does not answer", error=str(error))
                failing = True
                await asyncio.sleep(_RETRY_S)
                continue
            failing = False
            self._joined.set()
            listing = Listing(response.listed_chunks, response.listed_digest, response.changes)
            news = ClusterNews(response.index_epoch, response.theta_bytes, listing, response.rebuild)
            self._on_news(news)
            await asyncio.sleep(response.interval_ms / 1000)
