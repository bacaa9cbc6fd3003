"""Certificates that are replaced while servers and channels use them, on real connections."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quire.model.errors import ConfigInvalid, NodeUnavailable
from quire.wire import tls as tls_module
from quire.wire.channels import ChannelPool, call, stream
from quire.wire.credentials import AUTHORIZATION
from quire.wire.tls import MEMBER_NAME, Tls, tls_of_environment
from quire_server.access import certs

_ASKED = health_pb2.HealthCheckRequest()


def _member(folder: Path, name: str, server_name: str = MEMBER_NAME) -> Tls:
    return Tls(folder / "ca.pem", folder / name / "tls.crt", folder / name / "tls.key", server_name)


class _Health(health.aio.HealthServicer):
    """Remembers what callers showed."""

    shown: str | None = None

    async def Check(self, request: Any, context: Any) -> Any:
        self.shown = dict(context.invocation_metadata()).get(AUTHORIZATION)
        return await super().Check(request, context)


@contextlib.asynccontextmanager
async def _server(tls: Tls, *, clients_too: bool) -> AsyncIterator[tuple[int, _Health]]:
    server, servicer = grpc.aio.server(), _Health()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials(clients_too=clients_too))
    await server.start()
    try:
        yield port, servicer
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def _stub(address: str, tls: Tls | None, token: str = "") -> AsyncIterator[Any]:
    channels = ChannelPool(tls, token)
    try:
        yield health_pb2_grpc.HealthStub(channels.get(address))
    finally:
        await channels.close()


async def _answers(stub: Any) -> bool:
    answer = await call(stub.Check, _ASKED, timeout_s=20)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_members_know_each_other_by_name_and_show_their_token(tmp_path: Path) -> None:
    certs.make(tmp_path, [], 1)
    async with (
        _server(_member(tmp_path, "storage"), clients_too=True) as (port, servicer),
        _stub(f"127.0.0.1:{port}", _member(tmp_path, "gateway"), "secret") as stub,
    ):
        assert await _answers(stub)
        watched = stream(stub.Watch, _ASKED, timeout_s=20)
        assert (await anext(watched)).status == health_pb2.HealthCheckResponse.SERVING
        await watched.aclose()
    assert servicer.shown == "Bearer secret"


@pytest.mark.parametrize("which", ["no certificate", "another authority", "another name", "no TLS"])
async def test_strangers_are_not_answered(tmp_path: Path, which: str) -> None:
    certs.make(tmp_path / "ours", [], 1)
    certs.make(tmp_path / "theirs", [], 1)
    ours = tmp_path / "ours"
    of_client = {
        "no certificate": Tls(ours / "ca.pem", server_name=MEMBER_NAME),
        "another authority": _member(tmp_path / "theirs", "gateway"),
        "another name": _member(ours, "gateway", "someone.else"),
        "no TLS": None,
    }[which]
    async with (
        _server(_member(ours, "storage"), clients_too=True) as (port, _),
        _stub(f"127.0.0.1:{port}", of_client) as stub,
    ):
        with pytest.raises(NodeUnavailable):
            await _answers(stub)


async def test_of_several_addresses_the_certificate_names_the_first(tmp_path: Path) -> None:
    certs.make(tmp_path, [], 1)
    of_clients = Tls(tmp_path / "public" / "ca.crt")
    public = Tls(None, tmp_path / "public" / "tls.crt", tmp_path / "public" / "tls.key")
    async with (
        _server(public, clients_too=False) as (port, _),
        _stub(f"127.0.0.1:1, 127.0.0.1:{port}", of_clients) as stub,
    ):
        assert await _answers(stub)


async def test_both_sides_take_up_another_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "_LOOK_S", 0.0)
    certs.make(tmp_path, [], 1)
    async with _server(_member(tmp_path, "storage"), clients_too=True) as (port, _):
        async with _stub(f"127.0.0.1:{port}", _member(tmp_path, "gateway")) as stub:
            assert await _answers(stub)
            key = (tmp_path / "gateway" / "tls.key").read_bytes()
            (tmp_path / "gateway" / "tls.key").unlink()
            assert await _answers(stub)  # half of a rotation: the old one serves
            (tmp_path / "gateway" / "tls.key").write_bytes(key)
            for file in "ca.pem", "ca-key.pem":
                (tmp_path / file).unlink()
            certs.make(tmp_path, [], 1)
            assert await _answers(stub)
        async with _stub(f"127.0.0.1:{port}", _member(tmp_path, "gateway")) as stub:
            assert await _answers(stub)


async def test_a_server_keeps_its_certificate_while_the_new_one_is_half_written(tmp_path: Path) -> None:
    certs.make(tmp_path, [], 1)
    async with _server(_member(tmp_path, "storage"), clients_too=True) as (port, _):
        (tmp_path / "storage" / "tls.key").unlink()
        async with _stub(f"127.0.0.1:{port}", _member(tmp_path, "gateway")) as stub:
            assert await _answers(stub)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    missing = Tls(tmp_path / "ca.pem")
    with pytest.raises(ConfigInvalid, match=r"ca.pem: No such file"):
        missing.channel_credentials()
    with pytest.raises(ConfigInvalid, match=r"ca.pem: No such file"):
        ChannelPool(missing).get("127.0.0.1:1").get_state()


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"QUIRE_CLIENT_{name}", raising=False)
    assert tls_of_environment() is None
    monkeypatch.setenv("QUIRE_CLIENT_CA", "/ca.pem")
    assert tls_of_environment("gateway") == Tls(Path("/ca.pem"), None, None, "gateway")
