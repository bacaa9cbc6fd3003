"""Every method of every service, called as every role, by certificate and by header: the table decides, and it is
complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from quire import PROTOCOL_VERSION
from quire.model.errors import NotAllowed, QuireError
from quire.model.nodes import Node, StorageInfo
from quire.wire.channels import ChannelPool, call
from quire.wire.convert import node_to
from quire.wire.credentials import CALLER, Caller, proof
from quire.wire.status import error_of
from quire.wire.tls import MEMBER_NAME, OPERATOR, SERVICES, Tls
from quire.wire.v1 import decoder_pb2, gateway_pb2, orchestrator_pb2, scheduler_pb2, storage_pb2
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire_server.access.roles import ROLES, roles_of
from quire_tools.local import LocalCluster
from tests.e2e.helpers import members

_FILES = (gateway_pb2, orchestrator_pb2, storage_pb2, scheduler_pb2, decoder_pb2)
DESCRIBED = {each.full_name: each for file in _FILES for each in file.DESCRIPTOR.services_by_name.values()}
_BY_TOKEN = {"quire.v1.GatewayService", "quire.v1.AdminService"}  # which clients and operators show
_ADDRESSES = {
    "quire.v1.OrchestratorService": "orchestrator",
    "quire.v1.StorageService": "storage-0",
    "quire.v1.DecoderService": "decoder-0",
    "quire.v1.SchedulerService": "scheduler",
    "quire.v1.GatewayService": "gateway",
}


Clusters = dict[str, LocalCluster]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """A cluster whose members show certificates, and one without TLS whose members show headers."""
    with contextlib.ExitStack() as stack:
        yield {
            kind: stack.enter_context(
                LocalCluster(
                    tmp_path_factory.mktemp(kind),
                    tls=kind == "certificate",
                    decoders=1,
                    settings={"QUIRE_DECODER_WARM": "false"},
                    arena_bytes=64 << 20,
                    drive_bytes=128 << 20,
                )
            )
            for kind in ("certificate", "header")
        }


def test_the_table_names_every_method_and_no_other() -> None:
    """A new method is refused to everybody until it has a row."""
    described = {name: {method.name for method in each.methods} for name, each in DESCRIBED.items()}
    assert {name: set(methods) for name, methods in ROLES.items()} == described
    assert not roles_of("/quire.v1.StorageService/Unknown") and not roles_of("/quire.v1.Unknown/Deliver")
    assert all(roles <= {*SERVICES, OPERATOR} and roles for methods in ROLES.values() for roles in methods.values())


def _pool(cluster: LocalCluster, kind: str, role: str) -> ChannelPool:
    if kind == "header":
        return members(cluster, role)
    pair = cluster.folder / "certs" / role
    return ChannelPool(Tls(pair / "ca.crt", pair / "tls.crt", pair / "tls.key", MEMBER_NAME))


@pytest.mark.parametrize("kind", ["certificate", "header"])
@pytest.mark.parametrize("role", [*SERVICES, OPERATOR])
async def test_a_role_calls_its_methods_only(clusters: Clusters, role: str, kind: str) -> None:
    cluster, wrong = clusters[kind], []
    pool = _pool(cluster, kind, role)
    for service, described in DESCRIBED.items():
        if kind == "header" and service in _BY_TOKEN:
            continue
        address = cluster.admin_address if "Admin" in service else cluster.address(_ADDRESSES[service])
        for method in described.methods:
            path = f"/{service}/{method.name}"
            error = await _asked(pool.get(address), path, method)
            refused = isinstance(error, NotAllowed) and "is for:" in str(error)
            if refused == (role in roles_of(path)):
                wrong.append((path, refused, str(error)))
    await pool.close()
    assert not wrong


async def test_without_tls_callers_prove_their_role_to_each_service(clusters: Clusters) -> None:
    """No header, the proof for another service, another cluster's, and another role's are refused."""
    cluster = clusters["header"]
    (_, proved), (_, elsewhere) = (
        Caller("gateway", cluster.secret.encode()).header_for(f"/quire.v1.{service}/Any")
        for service in ("StorageService", "DecoderService")
    )
    foreign = Caller("gateway", b"another" * 5).header_for("/quire.v1.StorageService/Any")[1]
    forged = proved.replace("gateway:", "storage:")
    pool = ChannelPool()
    prefetch = pool.get(cluster.address("storage-0")).unary_unary(
        "/quire.v1.StorageService/Prefetch",
        request_serializer=storage_pb2.PrefetchChunksRequest.SerializeToString,
        response_deserializer=storage_pb2.PrefetchChunksResponse.FromString,
    )
    outcomes = []
    for header in ("", elsewhere, foreign, forged, proved):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await prefetch(
                storage_pb2.PrefetchChunksRequest(), timeout=10, metadata=((CALLER, header),) if header else ()
            )
        outcomes.append(type(error_of(error.value)).__name__)
    await pool.close()
    assert outcomes == ["Unauthenticated", *["SecretDiffers"] * 3, "LeaseForged"], "the last one lacks a permit alone"


async def test_a_member_reports_as_its_own_role(clusters: Clusters) -> None:
    cluster = clusters["header"]
    pool, secret = members(cluster, "decoder"), cluster.secret.encode()
    orchestrator: OrchestratorServiceStub = OrchestratorServiceStub(pool.get(cluster.address("orchestrator")))
    node = Node(node_id="storage-9", about=StorageInfo(), protocol_version=PROTOCOL_VERSION)
    request = orchestrator_pb2.HeartbeatRequest(node=node_to(node), proof=proof("storage-9", "", secret))
    with pytest.raises(NotAllowed, match="decoder reports as a storage"):
        await call(orchestrator.Heartbeat, request, timeout_s=10)
    await pool.close()


async def _asked(channel: Any, path: str, method: Any) -> QuireError | None:
    """The error that an empty request ends with."""
    kind = ("stream" if method.client_streaming else "unary") + ("_stream" if method.server_streaming else "_unary")
    request, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    coders = {"request_serializer": request.SerializeToString, "response_deserializer": answer.FromString}
    ask = getattr(channel, kind)(path, **coders)
    try:
        if method.client_streaming:
            await anext(aiter(ask(iter([request()]), timeout=2)))
        elif method.server_streaming:
            await anext(aiter(ask(request(), timeout=2)))
        else:
            await ask(request(), timeout=5)
    except grpc.aio.AioRpcError as error:
        return error_of(error)
    except StopAsyncIteration:
        pass
    return None
