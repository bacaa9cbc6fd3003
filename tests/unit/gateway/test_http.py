"""The HTTP frontend counts a request until its last byte has left, and gives a slow body no turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire.model.errors import ChunkMissing
from quire.testing import FakeClock
from quire_gateway.admission import Admission, Need, Principal
from quire_gateway.config import GatewayConfig
from quire_gateway.core.limits import Taken
from quire_gateway.http import ImagesFrontend
from quire_tools.local.ports import free_ports

MIB = 1 << 20


class _Counted(Admission):
    """How many requests are being answered."""

    running = 0

    @contextlib.contextmanager
    def admit(self, principal: Principal, need: Need) -> Iterator[Taken]:
        with super().admit(principal, need) as taken:
            self.running += 1
            try:
                yield taken
            finally:
                self.running -= 1


class _Images:
    """Records of 32 MiB; a put answers at once."""

    async def get_record(self, image_id: str) -> bytes:
        if image_id == "gone":
            raise ChunkMissing("gone")
        return bytes(32 * MIB)

    async def put_record(self, image_id: str, record: bytes, **_: Any) -> Any:
        return SimpleNamespace(image_id=image_id, latent_sha256=bytes(32), record_bytes=len(record))


@pytest.fixture
async def frontend() -> AsyncIterator[tuple[_Counted, int]]:
    none: Any = None
    (free_port,) = free_ports(1)
    config = GatewayConfig(cluster_secret="s" * 32, http_listen=f"127.0.0.1:{free_port}", http_requests_max=4)
    admission, images = _Counted(config, none, FakeClock()), _Images()
    served = ImagesFrontend(config, images, admission)  # type: ignore[arg-type]
    await served.start()
    yield admission, free_port
    await served.close()


async def _ask(port: int, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(request)
    await writer.drain()
    return reader, writer


async def test_an_answer_that_is_not_read_counts(frontend: tuple[_Counted, int]) -> None:
    """Its slot was free at once, and its bytes stayed in memory: so many clients, so many bodies."""
    admission, port = frontend
    reader, writer = await _ask(port, b"GET /v1/latents/one HTTP/1.1\r\nHost: h\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head and b"X-Request-Id" in head and str(32 * MIB).encode() in head
    await asyncio.sleep(0.2)
    assert admission.running == 1
    assert len(await reader.readexactly(32 * MIB)) == 32 * MIB
    async with asyncio.timeout(5):
        while admission.running:
            await asyncio.sleep(0.01)
    writer.close()


async def test_an_error_is_an_answer_of_its_own(frontend: tuple[_Counted, int]) -> None:
    _, port = frontend
    reader, writer = await _ask(port, b"GET /v1/latents/gone HTTP/1.1\r\nHost: h\r\n\r\n")
    assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_head_has_no_body(frontend: tuple[_Counted, int]) -> None:
    """What follows it on the connection is the next answer."""
    _, port = frontend
    reader, writer = await _ask(port, b"HEAD /v1/latents/one HTTP/1.1\r\nHost: h\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head and str(32 * MIB).encode() in head
    writer.write(b"GET /v1/latents/gone HTTP/1.1\r\nHost: h\r\n\r\n")
    assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_bodies_that_trickle_hold_no_turn(frontend: tuple[_Counted, int]) -> None:
    """One at a time is put here: the trickling ones come first, and the whole one is answered."""
    _, port = frontend
    headers = b"Host: h\r\nContent-Type: application/x-quire-latent\r\nContent-Length: 4\r\n\r\n"
    head = b"PUT /v1/images/one HTTP/1.1\r\n" + headers
    slow = [await _ask(port, head + b"ab") for _ in range(3)]
    reader, writer = await _ask(port, head + b"abcd")
    async with asyncio.timeout(5):
        assert b" 201 " in await reader.readuntil(b"\r\n\r\n")
    for _, each in [*slow, (reader, writer)]:
        each.close()
