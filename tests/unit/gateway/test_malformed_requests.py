"""Requests that aiohttp cannot parse, on real listeners: their answers have the form of other errors."""

from __future__ import annotations

import asyncio
import json
from xml.etree.ElementTree import fromstring

import pytest
from aiohttp import web

from quire_gateway.http.problems import malformed_problem
from quire_gateway.s3.frontend import _malformed
from quire_server.limits.connections import HttpConnections, listen
from quire_server.malformed_requests import MalformedAnswer
from quire_tools.local.ports import free_ports

_LONG = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret" + b"a" * 20_000 + b"\r\n\r\n"
_LONG_PATH = b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
_NONSENSE = b"GET / HTTP/1.1\r\nHost x\r\n\r\n"


async def _answer(request: bytes, malformed: MalformedAnswer) -> tuple[int, dict[str, str], bytes]:
    """Send a request to a server; return the answer until the server closes the connection."""

    async def serve(_: web.BaseRequest) -> web.Response:
        return web.Response(text="served")

    runner = web.ServerRunner(web.Server(serve), shutdown_timeout=0.1)
    await runner.setup()
    (port,) = free_ports(1)
    await listen(runner, f"127.0.0.1:{port}", HttpConnections(lambda: 9, malformed))
    try:
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
    finally:
        await runner.cleanup()
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


@pytest.mark.parametrize(("request_bytes", "status"), [(_LONG, 431), (_LONG_PATH, 431), (_NONSENSE, 400)])
async def test_problems(request_bytes: bytes, status: int) -> None:
    """The answers were plain text."""
    answered, headers, body = await _answer(request_bytes, malformed_problem)
    assert (answered, headers["content-type"]) == (status, "application/problem+json; charset=utf-8")
    problem = json.loads(body)
    assert problem["status"] == status and problem["detail"] and problem["request_id"]
    assert b"secret" not in body and b"aaaa" not in body, "nothing of the request is quoted"


@pytest.mark.parametrize(
    ("request_bytes", "code"), [(_LONG, "RequestHeaderSectionTooLarge"), (_NONSENSE, "BadRequest")]
)
async def test_errors_of_s3(request_bytes: bytes, code: str) -> None:
    answered, headers, body = await _answer(request_bytes, _malformed)
    assert (answered, headers["content-type"]) == (400, "application/xml")
    assert fromstring(body).findtext("Code") == code


async def test_a_request_that_can_be_parsed_is_served() -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert (await _answer(request, malformed_problem))[::2] == (200, b"served")
