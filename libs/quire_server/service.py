"""The frame that every service's `main()` stands in."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import faulthandler
import gc
import os
import platform
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import uvloop

from quire import PROTOCOL_VERSION, __version__
from quire.model.errors import ConfigInvalid, QuireError
from quire.model.health import CERTIFICATE_DAYS
from quire.model.nodes import Node
from quire.telemetry import be_background, logger
from quire.wire.channels import ChannelPool
from quire.wire.credentials import Caller
from quire.wire.tls import MEMBER_NAME, Tls
from quire_server import tasks
from quire_server.clock import ClusterClock
from quire_server.config import MemberConfig, ServiceConfig, read, variable_name
from quire_server.grpc_server import Server, until_signalled
from quire_server.membership.heartbeat import ClusterNews, Heartbeat
from quire_server.membership.membership_log import KnownNodes
from quire_server.preflight import preflight
from quire_server.telemetry import configure, keep_spans, publish
from quire_server.telemetry.build_info import CertificateLife, publish_build, publish_expiry
from quire_server.telemetry.loop_lag import loop_lag
from quire_server.telemetry.metrics import metrics_listener
from quire_server.telemetry.setup import repeats

Config = TypeVar("Config", bound=ServiceConfig)
_STOP_MORE_S = 10.0
_LOOK_S = 5.0
_COLLECTED_AFTER = 20_000
_DESCRIPTORS = 65_536
Closing = Callable[[], Awaitable[None]]


def run_service(name: str, kind: type[Config], prefix: str, serve: Callable[[Config], Awaitable[None]]) -> None:
    """Read the configuration, set up telemetry, run `serve` on uvloop until it returns.

    A `QuireError` (a wrong variable, a foreign pool) ends the process with status 2 and one line. `--check` reads the
    configuration alone, `--help` prints it.
    """
    arguments = _arguments(name, kind, prefix)
    if arguments.check:
        config, problems = read(kind, prefix)
        problems += preflight(config, prefix)
        print("\n".join(problems) or "the configuration can be used")
        sys.exit(2 if problems else 0)
    raise_descriptors()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there are tasks to tell of
    configure(name, node_id=os.environ.get(f"{prefix}NODE_ID", ""), metrics_too=True)
    try:
        config, problems = read(kind, prefix)
        if problems := problems + preflight(config, prefix):
            logger().error("cannot start", error=ConfigInvalid.code(), problems=problems)
            sys.exit(2)
        keep_spans(name, config.trace_recent)
        publish_build(name)
        publish_expiry([Path(certificate) for certificate in config.certificates])
        about = {"version": __version__, "protocol": PROTOCOL_VERSION, "kernel": platform.release()}
        logger().info("starts", role=name, listen=str(getattr(config, "listen", "")), **about)
        uvloop.run(_serve(serve, config))
    except QuireError as error:
        logger().error("cannot start", error=error.code(), problems=[str(error)])
        sys.exit(2)
    except Exception as error:
        logger().critical("ended unexpectedly", exc_info=error)
        sys.exit(1)


def raise_descriptors() -> None:
    """Raise this process' limit of open files towards its hard limit, to 65,536 at most: a connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _arguments(name: str, kind: type[Config], prefix: str) -> argparse.Namespace:
    """Parse the command line. `--help` prints and ends."""
    rows = []
    for field in dataclasses.fields(kind):
        default = " (must be set)" if field.metadata.get("required") else f" [{field.default}]" * (field.default != "")
        rows.append(f"  {variable_name(prefix, field)}{default}\n      {field.metadata['doc']}")
    parser = argparse.ArgumentParser(
        prog=f"quire-{name}",
        description=f"Quire's {name}. It is configured by environment variables and runs until SIGTERM.",
        epilog="variables:\n" + "\n".join(rows),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--check", action="store_true", help="say what is wrong with the configuration, and end")
    return parser.parse_args()


async def _serve(serve: Callable[[Config], Awaitable[None]], config: Config) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tasks.say_where, "where the tasks are")
    faulthandler.register(signal.SIGUSR1, chain=True)  # the threads, though the loop be blocked; then the tasks
    be_background()
    # Imported modules stay: no collection walks them again. A request leaves few cycles behind.
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)
    try:
        async with metrics_listener(config.metrics_listen), loop_lag():
            ended = asyncio.create_task(_say_what_ended())
            try:
                await serve(config)
            finally:
                ended.cancel()
    except Exception:
        # The loop would cancel the remaining tasks once, and wait for them: see `tasks.end`.
        await tasks.end(asyncio.all_tasks() - {asyncio.current_task()})
        raise


async def _say_what_ended() -> None:
    """Log a last line for repeated failures that have ended."""
    while True:
        await asyncio.sleep(_LOOK_S)
        for line in repeats.ended():
            about = {name: value for name, value in line.items() if name not in ("event", "level", "timestamp")}
            logger().info(line["event"], **about)


def member_tls(config: ServiceConfig) -> Tls | None:
    """Return the certificates for connections between members; None without TLS."""
    if not config.cluster_ca:
        return None
    return Tls(Path(config.cluster_ca), Path(config.cluster_cert), Path(config.cluster_key), MEMBER_NAME)


def member_channels(config: MemberConfig, role: str) -> ChannelPool:
    """Return the channels of a member to other members, which it calls as `role`."""
    tls = member_tls(config)
    return ChannelPool(tls, caller=Caller(role, config.secrets[0]) if tls is None else None)


class MemberSettings(Protocol):
    """The part of a member's configuration that `serve_member` needs."""

    @property
    def orchestrator_address(self) -> str: ...
    @property
    def secrets(self) -> tuple[bytes, ...]: ...
    @property
    def stop_grace_s(self) -> float: ...
    @property
    def drain_s(self) -> float: ...
    @property
    def certificates(self) -> list[str]: ...


async def serve_member(
    server: Server,
    channels: ChannelPool,
    config: MemberSettings,
    describe: Callable[[], Node],
    on_news: Callable[[ClusterNews], None] = lambda news: None,
    *,
    clock: ClusterClock,
    roster: KnownNodes | None = None,
    stopping: Callable[[], None] = lambda: None,
    frontends: Sequence[Closing] = (),
    last: Sequence[Closing] = (),
) -> None:
    """Run a member of the cluster: serve, announce itself, and on SIGTERM leave, finish, and hang up.

    Matches of earlier look-ups can be fetched for `config.drain_s`. Then `frontends` are closed, whose requests need
    this service's parts, then the service (`stopping`: when it takes nothing more), then `last`, which still calls
    others. Heartbeat responses update `roster`, the storage nodes, and `clock`.
    """
    describe = _with_certificates(describe, CertificateLife(config.certificates))
    publish(lambda: describe().all_stats)
    address, secret, grace_s = config.orchestrator_address, config.secrets[0], config.stop_grace_s
    heartbeat = Heartbeat(channels, address, describe, on_news, roster, secret=secret, clock=clock)
    await server.start()
    heartbeat.start()
    node = describe()
    about = {"node": node.node_id, "incarnation": node.incarnation, **node.notes}
    await until_stopped(stop_within_s(grace_s, config.drain_s), address=node.grpc_address, **about)
    await heartbeat.leave()
    await server.drain(config.drain_s)
    await asyncio.gather(*(close() for close in frontends))
    await server.stop(grace_s, stopping)
    for close in last:
        await close()
    await channels.close()


def _with_certificates(describe: Callable[[], Node], life: CertificateLife) -> Callable[[], Node]:
    """Add to a member's description for how long its certificates are good."""

    def described() -> Node:
        node, days = describe(), life.days
        return node if days is None else dataclasses.replace(node, stats={**node.stats, CERTIFICATE_DAYS: days})

    return described


async def until_stopped(stop_within_s: float, **about: str) -> None:
    """Say that the service serves, wait for the request to stop, and log its reason."""
    logger().info("serves", **about)
    logger().info("stops", reason=await until_signalled(stop_within_s), **about)


def stop_within_s(grace_s: float, drain_s: float) -> float:
    """How long a stop may take: there is a wait for requests, for frontends, and for transfers."""
    return drain_s + 3 * grace_s + _STOP_MORE_S
