"""Every method of every service, called with the certificate of every role: the table decides, and it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from quire.model.errors import NotAllowed, QuireError
from quire.wire.channels import ChannelPool
from quire.wire.status import error_of
from quire.wire.tls import MEMBER_NAME, OPERATOR, SERVICES, Tls
from quire.wire.v1 import decoder_pb2, gateway_pb2, orchestrator_pb2, scheduler_pb2, storage_pb2
from quire_server.roles import ROLES, roles_of
from quire_tools.local import LocalCluster

_FILES = (gateway_pb2, orchestrator_pb2, storage_pb2, scheduler_pb2, decoder_pb2)
DESCRIBED = {each.full_name: each for file in _FILES for each in file.DESCRIPTOR.services_by_name.values()}
_ADDRESSES = {
    "quire.v1.OrchestratorService": "orchestrator",
    "quire.v1.StorageService": "storage-0",
    "quire.v1.DecoderService": "decoder-0",
    "quire.v1.SchedulerService": "scheduler",
    "quire.v1.GatewayService": "gateway",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("roles")
    with LocalCluster(folder, tls=True, decoders=1, arena_bytes=64 << 20, drive_bytes=128 << 20) as made:
        yield made


def test_the_table_names_every_method_and_no_other() -> None:
    """A new method is refused to everybody until it has a row."""
    described = {name: {method.name for method in each.methods} for name, each in DESCRIBED.items()}
    assert {name: set(methods) for name, methods in ROLES.items()} == described
    assert not roles_of("/quire.v1.StorageService/Unknown") and not roles_of("/quire.v1.Unknown/Deliver")
    assert all(roles <= {*SERVICES, OPERATOR} and roles for methods in ROLES.values() for roles in methods.values())


@pytest.mark.parametrize("role", [*SERVICES, OPERATOR])
async def test_a_role_calls_its_methods_only(cluster: LocalCluster, role: str) -> None:
    pair = cluster.folder / "certs" / role
    pool = ChannelPool(Tls(pair / "ca.crt", pair / "tls.crt", pair / "tls.key", MEMBER_NAME))
    wrong = []
    for service, described in DESCRIBED.items():
        address = cluster.admin_address if "Admin" in service else cluster.address(_ADDRESSES[service])
        for method in described.methods:
            path = f"/{service}/{method.name}"
            error = await _asked(pool.get(address), path, method)
            refused = isinstance(error, NotAllowed) and "is for:" in str(error)
            if refused == (role in roles_of(path)):
                wrong.append((path, refused, str(error)))
    await pool.close()
    assert not wrong


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
