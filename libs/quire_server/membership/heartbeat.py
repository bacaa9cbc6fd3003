"""Membership from a node's side: announce, keep announcing, leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.model.errors import NameTaken, QuireError, SecretDiffers, VersionUnsupported
from quire.model.index import Listing
from quire.model.nodes import Node, StorageState
from quire.model.policy import Theta
from quire.telemetry import background, counter, logger, names
from quire.wire.channels import ChannelPool, call
from quire.wire.convert import node_from, node_to, state_from
from quire.wire.credentials import proof
from quire.wire.v1 import orchestrator_pb2 as pb
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire_server.clock import ClusterClock
from quire_server.membership.membership_log import KnownNodes, MembershipChanges
from quire_server.readiness import readiness

_TIMEOUT_S = 2.0
_RETRY_S = 0.3
_ORCHESTRATOR = "orchestrator"
_REFUSALS = (VersionUnsupported, NameTaken, SecretDiffers)


@dataclass(frozen=True, slots=True)
class ClusterNews:
    """News of a heartbeat.

    The name of the index, another one if it was lost; the cluster's thresholds Θ; the index's listing of
    this node, None if it was not read; and, if this node is to register the contents of the object tier, the name under
    which it reports that. `state`: what is asked of a storage node; None if it was not told.
    """

    index_epoch: str
    theta: Theta = field(default_factory=Theta)
    listing: Listing | None = None
    rebuild: str = ""
    state: StorageState | None = None


class Heartbeat:
    """Announces `describe()` to the orchestrator at the interval that it sets.

    Each response updates `on_news` (the index), `roster` (the other storage nodes) and `clock`. `secret`: the
    cluster's.
    """

    def __init__(
        self,
        channels: ChannelPool,
        orchestrator_address: str,
        describe: Callable[[], Node],
        on_news: Callable[[ClusterNews], None] = lambda news: None,
        roster: KnownNodes | None = None,
        *,
        secret: bytes,
        clock: ClusterClock,
    ) -> None:
        self._clock = clock
        self._stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(orchestrator_address))
        self._describe = describe
        self._on_news = on_news
        self._roster = roster
        self._secret = secret
        self._task: asyncio.Task[None] | None = None
        self._joined = asyncio.Event()
        kinds = [{"reason": kind.code()} for kind in _REFUSALS]
        self._refused = counter(names.REFUSED_MEMBER, "1", "reports that the cluster refused", kinds)

    def start(self) -> None:
        """Begin; an orchestrator that is not there yet is waited for. The service is ready once it was accepted."""
        readiness.wait(_ORCHESTRATOR, "it has not answered yet")
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
            version = self._roster.version if self._roster is not None else ""
            node = self._describe()
            proof_ = proof(node.node_id, node.incarnation, self._secret)
            request = pb.HeartbeatRequest(node=node_to(node), members_version=version, proof=proof_)
            asked_s = self._clock.monotonic_s()
            try:
                response = await call(self._stub.Heartbeat, request, timeout_s=_TIMEOUT_S)
            except QuireError as error:
                if isinstance(error, _REFUSALS) or not self._joined.is_set():
                    readiness.wait(_ORCHESTRATOR, str(error))
                if isinstance(error, _REFUSALS):
                    self._refused.add(1, {"reason": error.code()})
                    logger().error("the cluster does not use this node", node=node.node_id, error=str(error))
                elif not failing:
                    logger().warning("the orchestrator does not answer", error=str(error))
                failing = True
                await asyncio.sleep(_RETRY_S)
                continue
            failing = False
            self._clock.follow(response.now_ms, asked_s)
            self._joined.set()
            readiness.reached(_ORCHESTRATOR)
            if self._roster is not None:
                self._roster.update(
                    MembershipChanges(
                        response.members_version,
                        tuple(map(node_from, response.members)),
                        tuple(response.gone),
                        response.all_members,
                    )
                )
            listing = None
            if response.has_listing:
                listing = Listing(response.listed_chunks, response.listed_digest, response.changes)
            theta = Theta(response.theta_bytes, response.theta_object_bytes)
            state = state_from(response.state) if response.state else None
            news = ClusterNews(response.index_epoch, theta, listing, response.rebuild, state)
            self._on_news(news)
            await self._pause(response.interval_ms / 1000)

    async def _pause(self, seconds: float) -> None:
        if self._roster is None:
            await asyncio.sleep(seconds)
        else:
            await self._roster.wanted(seconds)
