"""Stopping and starting without a lost request; versions that do not fit; configurations that cannot work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire import PROTOCOL_OLDEST, PROTOCOL_VERSION
from quire.client import AsyncClient
from quire.model.errors import QuireError, TooManyRequests, VersionUnsupported
from quire.model.nodes import Node, StorageInfo
from quire.wire.channels import call
from quire.wire.convert import node_to
from quire.wire.status import error_of, trailers_of
from quire.wire.v1 import gateway_pb2, orchestrator_pb2
from quire.wire.v1.gateway_pb2_grpc import GatewayServiceStub
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire.wire.version import HEADER
from quire_tools.local import LocalCluster
from tests import fork_server
from tests.e2e.helpers import members
from tests.e2e.rolling import roll

LONG = bool(os.environ.get("QUIRE_TEST_LONG"))
"""Decoders too: they load torch at each start."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, vae: Path) -> Iterator[LocalCluster]:
    """Two of everything. Services drain."""
    drained = {f"QUIRE_{name}_DRAIN_S": "1" for name in ("ORCHESTRATOR", "GATEWAY", "STORAGE", "DECODER", "SCHEDULER")}
    settings = {**drained, "QUIRE_DECODER_MODELS": str(vae)}
    with LocalCluster(
        tmp_path_factory.mktemp("rolling"),
        storage_nodes=2,
        gateways=2,
        orchestrators=2,
        schedulers=2,
        decoders=2 if LONG else 0,
        arena_bytes=96 << 20,
        settings=settings,
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_rolling_restart_loses_no_request(cluster: LocalCluster, vae: Path) -> None:
    """Every service is stopped and started in turn."""
    names = [name for name in cluster.names if name != "redis"]
    assert len(names) == (10 if LONG else 8)
    done = await roll(cluster, names, vae=vae if LONG else None)
    assert done["hit"] > 50, done
    assert done["storing"] > 10, done
    assert done["looking"] > 10 or not LONG, done


async def test_a_node_of_another_protocol_is_told_so_and_not_used(cluster: LocalCluster) -> None:
    """A real storage node that speaks protocol 99: it logs why, and no look-up or status knows it."""
    code = (
        "import quire; quire.PROTOCOL_OLDEST = quire.PROTOCOL_VERSION = 99\nimport quire_storage.server as s; s.main()"
    )
    environment = {
        **os.environ,
        "QUIRE_CLUSTER_SECRET": cluster.secret,
        "QUIRE_ORCHESTRATOR_ADDRESS": cluster.address("orchestrator"),
        "QUIRE_STORAGE_NODE_ID": "from-the-future",
        "QUIRE_STORAGE_LISTEN": "127.0.0.1:0",
        "QUIRE_STORAGE_ARENA_BYTES": str(64 << 20),
        "QUIRE_STORAGE_DRAIN_S": "0",
        "QUIRE_STORAGE_OBJECT_URL": "",
    }
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        assert node.stderr is not None
        async with asyncio.timeout(30):
            while b"does not use this node" not in (line := await node.stderr.readline()):
                assert line, "it ended"
        assert b"protocol 99-99" in line
        async with AsyncClient(cluster.gateway_address) as client:
            assert "from-the-future" not in {member.node_id for member in await client.status()}
    finally:
        node.terminate()
        await asyncio.wait_for(node.wait(), 20)


async def test_callers_of_another_protocol_are_told_so(cluster: LocalCluster) -> None:
    pool = members(cluster, "storage")
    gateway: GatewayServiceStub = GatewayServiceStub(pool.get(cluster.address("gateway")))
    orchestrator: OrchestratorServiceStub = OrchestratorServiceStub(pool.get(cluster.address("orchestrator")))
    plain: Any = gateway.Status
    for said in ("99", "98-99", "0", "nonsense", "1-x"):
        with pytest.raises(grpc.aio.AioRpcError, match="protocol"):
            await plain(gateway_pb2.StatusRequest(), timeout=5, metadata=((HEADER, said),))
    assert (await plain(gateway_pb2.StatusRequest(), timeout=5)).nodes, "a plain gRPC client says nothing"
    for said in (str(PROTOCOL_VERSION), f"{PROTOCOL_OLDEST}-99", f"0-{PROTOCOL_OLDEST}"):
        assert (await plain(gateway_pb2.StatusRequest(), timeout=5, metadata=((HEADER, said),))).nodes
    node = Node(node_id="past", about=StorageInfo(), protocol_version=PROTOCOL_OLDEST - 1)
    with pytest.raises(VersionUnsupported, match="upgrade the older side"):
        await call(orchestrator.Heartbeat, orchestrator_pb2.HeartbeatRequest(node=node_to(node)), timeout_s=5)
    await pool.close()


@pytest.mark.parametrize(
    ("service", "wrong", "named"),
    [
        (
            "gateway",
            {
                "QUIRE_CLUSTER_SECRET": "",
                "QUIRE_GATEWAY_AUTH": "token",
                "QUIRE_GATEWAY_TLS_LISTEN": "127.0.0.1:0",
                "QUIRE_CLUSTER_CA": "/nowhere/ca.pem",
            },
            ["QUIRE_CLUSTER_SECRET"],
        ),
        (
            "gateway",
            {
                "QUIRE_CLUSTER_SECRET": "x" * 31,
                "QUIRE_GATEWAY_AUTH": "token",
                "QUIRE_GATEWAY_TLS_LISTEN": "127.0.0.1:0",
                "QUIRE_CLUSTER_CA": "/nowhere/ca.pem",
            },
            [
                "QUIRE_CLUSTER_SECRET: shorter than 32 bytes",
                "QUIRE_GATEWAY_AUTH",
                "QUIRE_GATEWAY_TLS_CERT",
                "QUIRE_CLUSTER_CA",
                "QUIRE_CLUSTER_CERT",
            ],
        ),
        (
            "storage",
            {
                "QUIRE_CLUSTER_SECRET": "x" * 32,
                "QUIRE_STORAGE_ARENA_BYTES": "much",
                "QUIRE_STORAGE_DRAIN_S": "-1",
                "QUIRE_STORAGE_TRANSFER_TIMEOUT_S": "9999",
                "QUIRE_STORAGE_INDEX_TIMEOUT_S": "nan",
            },
            [
                "QUIRE_STORAGE_ARENA_BYTES",
                "QUIRE_STORAGE_DRAIN_S",
                "QUIRE_STORAGE_TRANSFER_TIMEOUT_S",
                "QUIRE_STORAGE_INDEX_TIMEOUT_S",
            ],
        ),
        ("decoder", {"QUIRE_DECODER_CACHE_BYTES": "1.5"}, ["QUIRE_DECODER_CACHE_BYTES"]),
    ],
)
def test_a_wrong_configuration_is_named_at_the_start(service: str, wrong: dict[str, str], named: list[str]) -> None:
    """All of it at once, by the names of the variables, with status 2; and no secret is shown."""
    command = [sys.executable, "-m", f"quire_{service}.server"]
    done = fork_server.run(command, env={**os.environ, **wrong}, timeout=60)
    assert done.returncode == 2, done.stderr
    assert all(name in done.stderr for name in named), done.stderr
    assert "Traceback" not in done.stderr


def test_a_stop_that_hangs_ends_and_says_where(tmp_path: Path) -> None:
    """Whatever it waits for: after its deadline the process is gone, with a traceback in its log."""
    code = """
import asyncio, quire_server.service as service, quire_scheduler.server as scheduler
async def hang_at_the_end(self):
    await asyncio.sleep(60)
service._STOP_MORE_S = 1.0
scheduler.Leadership.close = hang_at_the_end
scheduler.main()
"""
    settings = {"QUIRE_SCHEDULER_LISTEN": "127.0.0.1:0", "QUIRE_SCHEDULER_DRAIN_S": "0", "QUIRE_REDIS_URL": ""}
    settings |= {"QUIRE_SCHEDULER_STOP_GRACE_S": "0", "QUIRE_ORCHESTRATOR_ADDRESS": "127.0.0.1:1"}
    settings |= {"QUIRE_CLUSTER_SECRET": "x" * 32}
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **settings}, stderr=out)
    try:
        deadline = time.monotonic() + 20
        while "does not answer" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 1
    finally:
        process.kill()
    assert "Timeout" in log.read_text()


def test_errors_know_when_to_come_again() -> None:
    """Through trailing metadata and back."""
    sent = TooManyRequests("full", retry_after_s=0.25)
    raw = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers_of(sent)), str(sent)
    )
    got = error_of(raw)
    assert isinstance(got, TooManyRequests)
    assert isinstance(got, QuireError)
    assert got.retry_after_s == 0.25
