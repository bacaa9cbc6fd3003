"""The frame that every service's `main()` stands in."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import uvloop

from quire.model.errors import QuireError
from quire.model.nodes import Node
from quire.telemetry import be_background, logger
from quire.wire.channels import ChannelPool
from quire.wire.tls import MEMBER_NAME, Tls
from quire_server.config import ServiceConfig, load
from quire_server.grpc_server import Server, until_signalled
from quire_server.heartbeat import ClusterNews, Heartbeat
from quire_server.roster import Roster
from quire_server.telemetry import configure, publish
from quire_server.telemetry.lag import loop_lag
from quire_server.telemetry.metrics import metrics_listener

Config = TypeVar("Config", bound=ServiceConfig)
_STOP_MORE_S = 10.0
_COLLECTED_AFTER = 20_000
Closing = Callable[[], Awaitable[None]]


def run_service(name: str, kind: type[Config], prefix: str, serve: Callable[[Config], Awaitable[None]]) -> None:
    """Read the configuration, set up telemetry, run `serve` on uvloop until it returns.

    A `QuireError` (a wrong variable, a foreign pool) ends the process with status 2 and one line.
    """
    configure(name, metrics_too=True)
    try:
        config = load(kind, prefix)
        uvloop.run(_serve(serve, config))
    except QuireError as error:
        logger().error("cannot start", error=error.code(), message=str(error))
        sys.exit(2)


async def _serve(serve: Callable[[Config], Awaitable[None]], config: Config) -> None:
    be_background()
    # What was imported stays: no collection walks it again. A request leaves few cycles behind.
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)
    async with metrics_listener(config.metrics_listen), loop_lag():
        await serve(config)


def member_tls(config: ServiceConfig) -> Tls | None:
    """As a member speaks with members; None where they speak without TLS."""
    if not config.cluster_ca:
        return None
    return Tls(Path(config.cluster_ca), Path(config.cluster_cert), Path(config.cluster_key), MEMBER_NAME)


async def serve_member(
    server: Server,
    channels: ChannelPool,
    orchestrator_address: str,
    describe: Callable[[], Node],
    grace_s: float,
    drain_s: float,
    on_news: Callable[[ClusterNews], None] = lambda news: None,
    *,
    roster: Roster | None = None,
    stopping: Callable[[], None] = lambda: None,
    frontends: Sequence[Closing] = (),
    last: Sequence[Closing] = (),
) -> None:
    """The life of a member of the cluster: serve, announce itself, and on SIGTERM leave, finish, and hang up.

    What was looked up before it left can be had for `drain_s`. Then `frontends` are closed, whose requests need this
    service's parts, then the service (`stopping`: when it takes nothing more), then `last`, which still calls others.
    `roster` hears who the storage nodes are.
    """
    publish(lambda: describe().all_stats)
    heartbeat = Heartbeat(channels, orchestrator_address, describe, on_news, roster)
    await server.start()
    heartbeat.start()
    await until_signalled(stop_within_s(grace_s, drain_s))
    await heartbeat.leave()
    await server.drain(drain_s)
    await asyncio.gather(*(close() for close in frontends))
    await server.stop(grace_s, stopping)
    for close in last:
        await close()
    await channels.close()


def stop_within_s(grace_s: float, drain_s: float) -> float:
    """How long a stop may take: there is a wait for requests, for frontends, and for transfers."""
    return drain_s + 3 * grace_s + _STOP_MORE_S
