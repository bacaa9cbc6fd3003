"""What membership costs in a large cluster: orchestrators and Redis are real, members say what real ones say.

Each member reports by the class that real members report with, and asks for the others as real storage nodes do. What
the services' processes take of the processor is measured while nothing changes, and then how long it takes until every
member knows that one was lost.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Final

import grpc
import typer
import uvloop
from rich.console import Console

from quire import PROTOCOL_VERSION
from quire.model.nodes import Location, Node, StorageInfo
from quire.model.permit import PermitSigner
from quire.wire.channels import ChannelPool
from quire.wire.credentials import Caller
from quire_server.clock import ClusterClock, SystemClock
from quire_server.membership.heartbeat import Heartbeat
from quire_server.membership.membership_log import KnownNodes
from quire_storage.adapters.cluster import GrpcPeers
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row

_SETTLE_S: Final = 8.0
_LOST_S: Final = 30.0
_STATS: Final = {f"stat {number}": float(number) for number in range(30)}
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class _Member:
    """A storage node's part in membership."""

    def __init__(self, number: int, orchestrator: str, listen: str, secret: bytes) -> None:
        self.channels = ChannelPool(caller=Caller("storage", secret))
        self._node = Node(
            node_id=f"storage-{number}",
            about=StorageInfo(worker_address=os.urandom(300), capacity_bytes=1 << 40, link=f"rack-{number % 40}"),
            grpc_address=listen,
            incarnation=os.urandom(8).hex(),
            protocol_version=PROTOCOL_VERSION,
            location=Location(f"host-{number}", f"zone-{number % 3}"),
            stats=_STATS,
            notes={"io": "io_uring", "data plane": "ucx"},
        )
        roster, clock = KnownNodes(), ClusterClock(SystemClock())
        self._heartbeat = Heartbeat(
            self.channels, orchestrator, lambda: self._node, roster=roster, secret=secret, clock=clock
        )
        self._peers = GrpcPeers(self.channels, orchestrator, roster, PermitSigner(secret), clock)

    async def start(self) -> None:
        self._heartbeat.start()
        await self._heartbeat.joined()

    async def known(self) -> set[str]:
        return {node.node_id for node in await self._peers.storage_nodes()}

    def fall_silent(self) -> None:
        if self._heartbeat._task is not None:
            self._heartbeat._task.cancel()


def run(sizes: list[int], orchestrators: int, seconds: float) -> Report:
    """For each number of members a cluster of its own, watched for so many seconds."""
    report = Report("membership", {"name": "one core", "unit": "cores"}, tall=True)
    for size in sizes:
        with Console().status(f"{size} members"), _cluster(orchestrators) as cluster:
            measured = uvloop.run(_members(cluster, size, orchestrators, seconds))
        report.rows.append(Row({"members": size}, measured, 1.0, measured["orchestrators, cores"]))
    report.notes += [
        f"{orchestrators} orchestrators together, over {seconds:g} s in which nothing changes; all on this machine",
        "lost: a member's process ends without a word",
    ]
    return report


@contextmanager
def _cluster(orchestrators: int) -> Iterator[LocalCluster]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        yield stack.enter_context(
            LocalCluster(Path(folder), storage_nodes=0, schedulers=0, gateways=1, orchestrators=orchestrators)
        )


async def _members(cluster: LocalCluster, size: int, orchestrators: int, seconds: float) -> dict[str, float]:
    names = [name for name in cluster.names if name.startswith("orchestrator")]
    server = grpc.aio.server()
    listen = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    mortal = grpc.aio.server()
    address = f"127.0.0.1:{mortal.add_insecure_port('127.0.0.1:0')}"
    await mortal.start()
    secret = cluster.secret.encode()
    members = [
        _Member(number, cluster.address(names[number % len(names)]), listen if number else address, secret)
        for number in range(size)
    ]
    for first in range(0, size, 50):
        await asyncio.gather(*(member.start() for member in members[first : first + 50]))
    await asyncio.sleep(_SETTLE_S)
    used = {name: _processor_s(cluster.pid(name)) for name in (*names, "redis")}
    own, began = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    passed = time.monotonic() - began
    spent = {name: (_processor_s(cluster.pid(name)) - before) / passed for name, before in used.items()}
    own = (time.process_time() - own) / passed
    known = [len(await member.known()) for member in members]
    assert min(known) == size, f"some know {min(known)} of {size}"
    await mortal.stop(None)
    lost_s = await _lose(members)
    for member in members:
        member.fall_silent()
    await asyncio.gather(*(member.channels.close() for member in members))
    await server.stop(None)
    return {
        "orchestrators, cores": sum(spent[name] for name in names),
        "Redis, cores": spent["redis"],
        "members, cores": own,
        "lost member known everywhere, s": lost_s,
    }


async def _lose(members: list[_Member]) -> float:
    """Seconds until no member knows the first one any more, which falls silent."""
    lost, others = members[0], members[1:]
    lost.fall_silent()
    since = time.monotonic()
    async with asyncio.timeout(_LOST_S):
        while any(["storage-0" in await member.known() for member in others]):
            await asyncio.sleep(0.05)
    return time.monotonic() - since


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def command(
    sizes: Annotated[str, typer.Option(help="how many members, separated by commas")] = "100,300,1000",
    orchestrators: Annotated[int, typer.Option(help="orchestrator processes")] = 4,
    seconds: Annotated[float, typer.Option(help="for how long processor time is measured")] = 20.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Processor time of orchestrators and Redis for a thousand members, and how soon a lost one is known."""
    run([int(size) for size in sizes.split(",")], orchestrators, seconds).show(json_file, plot)
