"""The HTTP frontend counts a request until its last byte has left, and gives a slow body no turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from quire.model.errors import ChunkMissing, NodeUnavailable
from quire.model.images import ImageEntry
from quire.testing import FakeClock
from quire_gateway.access.admission import Admission, Need, Principal
from quire_gateway.config import GatewayConfig
from quire_gateway.core.limits import Taken
from quire_gateway.http.frontend import ImagesFrontend
from quire_tools.local.ports import free_ports

MIB = 1 << 20


class _Counted(Admission):
    """How many requests are being answered, and from which images."""

    running = 0
    images: _Images

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

    def __init__(self) -> None:
        self.reading, self.told, self.read = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cut = False

    async def get_record(self, tenant: str, image_id: str) -> tuple[ImageEntry, bytes]:
        if image_id == "slow":
            self.reading.set()
            try:
                await self.told.wait()
            except asyncio.CancelledError:
                self.cut = True
                raise
            self.read.set()
        if image_id == "gone":
            raise ChunkMissing("gone")
        if image_id == "away":
            raise NodeUnavailable("storage-3 at 10.0.0.7:7412")
        return ImageEntry(image_id, bytes(32), 32 * MIB, bytes(32), "", 64, 64), bytes(32 * MIB)

    async def put_record(self, tenant: str, image_id: str, record: bytes, **_: Any) -> ImageEntry:
        return ImageEntry(image_id, bytes(32), len(record), bytes(32), "", 64, 64)


@pytest.fixture
async def frontend(request: pytest.FixtureRequest) -> AsyncIterator[tuple[_Counted, int]]:
    none: Any = None
    (free_port,) = free_ports(1)
    config = GatewayConfig(
        cluster_secret="s" * 32,
        http_listen=f"127.0.0.1:{free_port}",
        http_requests_max=4,
        http_origins=getattr(request, "param", ""),
    )
    admission, images = _Counted(config, none, FakeClock()), _Images()
    served = ImagesFrontend(config, images, none, none, admission)  # type: ignore[arg-type]
    await served.start()
    admission.images = images
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


async def _head(port: int, line: str, *headers: str) -> dict[str, str]:
    """Headers of the answer, by small letters; `:status` is its status."""
    reader, writer = await _ask(port, "\r\n".join([f"{line} HTTP/1.1", "Host: h", *headers, "", ""]).encode())
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    writer.close()
    found = {":status": status.split(" ")[1]}
    for each in lines:
        name, _, value = each.partition(": ")
        found[name.lower()] = ", ".join(filter(None, [found.get(name.lower()), value]))
    return found


_ASKED = ("Access-Control-Request-Method: PUT", "Access-Control-Request-Headers: content-type")


@pytest.mark.parametrize("frontend", ["https://a.example, https://b.example"], indirect=True)
async def test_pages_of_the_origins_that_are_named_may_fetch(frontend: tuple[_Counted, int]) -> None:
    """In answers with a body, without one, and in errors; a cache keeps those of different origins apart."""
    _, port = frontend
    for path in ("/v1/latents/one", "/v1/latents/gone", "/healthz"):
        for origin, allowed in (("https://b.example", "https://b.example"), ("https://c.example", None)):
            head = await _head(port, f"GET {path}", f"Origin: {origin}")
            assert head.get("access-control-allow-origin") == allowed, path
            assert "Origin" in head["vary"]
    head = await _head(port, "OPTIONS /v1/images/one", "Origin: https://a.example", *_ASKED)
    assert (head[":status"], head["access-control-allow-origin"]) == ("204", "https://a.example")
    assert "PUT" in head["access-control-allow-methods"]
    head = await _head(port, "OPTIONS /v1/images/one", "Origin: https://c.example", *_ASKED)
    assert "access-control-allow-origin" not in head


@pytest.mark.parametrize("frontend", ["*"], indirect=True)
async def test_all_origins_may_be_allowed(frontend: tuple[_Counted, int]) -> None:
    head = await _head(frontend[1], "GET /v1/latents/one", "Origin: https://c.example")
    assert head["access-control-allow-origin"] == "*"
    assert "vary" not in head


async def test_no_origin_is_allowed_unless_one_is_named(frontend: tuple[_Counted, int]) -> None:
    """And what is asked before a request has no answer but 405, which says what there is."""
    head = await _head(frontend[1], "OPTIONS /v1/images/one", "Origin: https://a.example", *_ASKED)
    assert (head[":status"], set(head["allow"].split(","))) == ("405", {"DELETE", "GET", "HEAD", "PUT"})
    assert "access-control-allow-origin" not in head


async def test_a_cluster_that_cannot_answer_says_when_to_ask_again_and_nothing_of_itself(
    frontend: tuple[_Counted, int],
) -> None:
    _, port = frontend
    reader, writer = await _ask(port, b"GET /v1/latents/away HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    assert " 503 " in answer.split("\r\n")[0]
    assert "Retry-After: 1" in answer
    assert "10.0.0.7" not in answer


async def test_health_needs_no_key_and_is_not_kept(frontend: tuple[_Counted, int]) -> None:
    head = await _head(frontend[1], "GET /healthz", "Authorization: Bearer unknown:key")
    assert (head[":status"], head["cache-control"]) == ("200", "no-store")


async def test_a_record_is_read_to_its_end_where_the_client_hangs_up(frontend: tuple[_Counted, int]) -> None:
    """A storage node writes into the gateway's memory: cut short, that memory would lie in quarantine."""
    admission, port = frontend
    _, writer = await _ask(port, b"GET /v1/latents/slow HTTP/1.1\r\nHost: h\r\n\r\n")
    async with asyncio.timeout(20):
        await admission.images.reading.wait()
        writer.transport.abort()
        for _ in range(50):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # the gateway sees it
        assert not admission.images.cut, "its reading was cancelled"
        admission.images.told.set()
        await admission.images.read.wait()
