"""The object tier over HTTP: refusals, ranges behind the end, and headers as metadata, with an S3 server of our own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from aiohttp import web

from quire.model.records import ChunkRecord
from quire_storage.adapters.objects import ObstoreTier
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.errors import ObjectTierFailed, ObjectTierThrottled
from quire_storage.tiers.object_tier import pack_object

_NAME = (b"k" * 32, 7)
_SLOW_DOWN = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass
class Server:
    """Objects with metadata, by path. `refusals`: answers to the next requests, as status and body."""

    objects: dict[str, tuple[bytes, dict[str, str]]] = field(default_factory=dict)
    refusals: list[tuple[int, str]] = field(default_factory=list)
    requests: int = 0

    async def handle(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.refusals:
            status, body = self.refusals.pop(0)
            return web.Response(status=status, text=body)
        if request.method == "PUT":
            metadata = {key: value for key, value in request.headers.items() if key.lower().startswith("x-amz-meta-")}
            self.objects[request.path] = await request.read(), metadata
            return web.Response(headers={"ETag": '"e"'})
        if request.path not in self.objects:
            return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>")
        data, metadata = self.objects[request.path]
        asked = request.http_range
        start, stop = asked.start or 0, min(len(data), asked.stop or len(data))
        if start >= len(data):
            return web.Response(status=416, text="<Error><Code>InvalidRange</Code></Error>")
        headers = {"ETag": '"e"', "Last-Modified": "Sat, 28 Nov 2026 08:00:00 GMT"} | metadata
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return web.Response(status=206, body=data[start:stop], headers=headers)


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Server, ObstoreTier]]:
    server, application = Server(), web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield server, ObstoreTier("s3://bucket/prefix", 5.0)
    await runner.cleanup()


def _object() -> tuple[Chunk, bytes]:
    payload = np.arange(2 * 4096, dtype=np.uint64).view(np.uint8)[: 2 * 4096].reshape(2, 4096)
    chunk = Chunk(ChunkRecord(_NAME[0], b"", _NAME[0], b""), 2, 4096, row_checksums(payload))
    return chunk, pack_object(chunk, payload)


async def test_the_first_layer_and_the_header_are_one_request(scene: tuple[Server, ObstoreTier]) -> None:
    server, tier = scene
    chunk, raw = _object()
    await tier.put(_NAME, raw)
    count = server.requests
    part = await tier.read(_NAME, 0, 4096)
    assert part is not None and server.requests == count + 1
    assert bytes(part.data) == raw[:4096] and part.size == len(raw)
    assert part.header is not None and raw[8192:].startswith(part.header)
    assert np.array_equal(np.frombuffer(part.header, dtype="<u4", offset=192), chunk.checksums)


async def test_an_object_without_metadata_or_with_a_rotten_one_has_no_header(
    scene: tuple[Server, ObstoreTier],
) -> None:
    server, tier = scene
    await tier.put(_NAME, _object()[1])
    for value in ({}, {"x-amz-meta-quireheader": "?"}):
        server.objects = {path: (data, value) for path, (data, _) in server.objects.items()}
        part = await tier.read(_NAME, 0, 4096)
        assert part is not None and part.header is None


async def test_refusals_are_told_from_failures(scene: tuple[Server, ObstoreTier]) -> None:
    """The adapter repeats neither: `ObjectReads` decides about further attempts."""
    server, tier = scene
    await tier.put(_NAME, _object()[1])
    server.requests = 0
    for status, body, error in (
        (503, _SLOW_DOWN, ObjectTierThrottled),
        (429, "", ObjectTierThrottled),
        (500, "<Error><Code>InternalError</Code></Error>", ObjectTierFailed),
        (403, "<Error><Code>ExpiredToken</Code></Error>", ObjectTierFailed),
    ):
        server.refusals = [(status, body)]
        with pytest.raises(ObjectTierFailed) as raised:
            await tier.read(_NAME, 0, 4096)
        assert type(raised.value) is error, (status, str(raised.value))
    assert server.requests == 4


async def test_what_is_not_there_is_none_and_behind_the_end_is_nothing(scene: tuple[Server, ObstoreTier]) -> None:
    _, tier = scene
    assert await tier.read(_NAME, 0, 10) is None
    _, raw = _object()
    await tier.put(_NAME, raw)
    part = await tier.read(_NAME, len(raw) + 5, len(raw) + 10)
    assert part is not None and not part.data
