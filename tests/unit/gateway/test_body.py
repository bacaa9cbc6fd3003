"""Bodies of S3 requests: slow ones cost no other request (findings 18 and 21)."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from isal import isal_zlib

from quire.model.records import NO_NAMESPACE, ChunkRecord
from quire_gateway.access.key_derivation import SameKeys
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.ports import ChunkAttributes
from quire_gateway.s3 import body as body_module
from quire_gateway.s3.body import Body
from quire_gateway.s3.checksums import BodyChecks
from quire_gateway.s3.declared import Described
from quire_gateway.s3.reserved import ChunkBackend
from quire_storage.core.chunks import Chunk
from quire_storage.tiers.object_tier import pack_object

_KEY = bytes(range(32))
_NAME = f"{NO_NAMESPACE.hex()}/{_KEY.hex()}"


class _Content:
    """What comes from a connection; nothing for as long as `slow`."""

    def __init__(self, data: bytes, *, slow: bool = False) -> None:
        self._data, self._slow = data, slow

    async def readany(self) -> bytes:
        if self._slow:
            await asyncio.sleep(3600)
        data, self._data = self._data, b""
        return data


class _Chunks:
    """An object tier in a dictionary."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}

    async def head(self, key: bytes) -> ChunkAttributes | None:
        return ChunkAttributes(key, 1, len(self.objects[key]), 0.0, "etag") if key in self.objects else None

    async def read(self, chunk: ChunkAttributes, start: int, end: int) -> memoryview:
        return memoryview(self.objects[chunk.key])[start:end]

    async def shard(self, first: str) -> list[ChunkAttributes]:
        return []

    async def write(self, key: bytes, data: bytes) -> None:
        self.objects[key] = data


class _Index:
    """Everything is listed."""

    async def expect_object(self, record: ChunkRecord) -> bool:
        return True

    async def commit_object(self, record: ChunkRecord) -> bool:
        return True

    async def lists_object(self, record: ChunkRecord) -> bool:
        return True

    async def evict_object(self, record: ChunkRecord) -> bool:
        return True


def _body(content: _Content, length: int) -> Body:
    return Body(content, length, BodyChecks({}, ""), None)


def _object() -> bytes:
    payload = np.arange(2 * 4096, dtype=np.uint8).reshape(2, 4096)
    sums = np.array([isal_zlib.crc32(row.tobytes()) for row in payload], dtype=np.uint32)
    return pack_object(Chunk(ChunkRecord(_KEY, b"", _KEY, b""), 2, 4096, sums), payload)


async def test_slow_bodies_hold_no_turns() -> None:
    """Four clients that send nothing, and turns for one: the next one's chunk is stored at once."""
    chunks, described = _Chunks(), Described({}, {})
    backend = ChunkBackend(chunks, _Index(), SameKeys(), contextlib.nullcontext)
    slow = [
        asyncio.create_task(backend.put(_NAME, _body(_Content(b"", slow=True), 9000), described, "")) for _ in range(4)
    ]
    await asyncio.sleep(0)
    raw = _object()
    async with asyncio.timeout(10):
        entry = await backend.put(_NAME, _body(_Content(raw), len(raw)), described, "")
        read = b"".join([bytes(piece) async for piece in backend.read(entry, 0, entry.size)])
    assert read == raw == chunks.objects[_KEY]
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.parametrize("at", [10, 5000])
async def test_a_damaged_object_is_not_passed_on(at: int) -> None:
    """Finding 8: a flipped bit in a layer, and the client gets no byte of that layer."""
    chunks, raw = _Chunks(), bytearray(_object())
    backend = ChunkBackend(chunks, _Index(), SameKeys(), contextlib.nullcontext)
    chunks.objects[_KEY] = bytes(raw)
    entry = await backend.head(_NAME)
    assert entry is not None
    raw[at] ^= 1
    chunks.objects[_KEY] = bytes(raw)
    got = bytearray()
    with pytest.raises(Exception, match="does not match its checksum"):
        async for piece in backend.read(entry, 0, entry.size):
            got += piece
    assert bytes(got) == b"", "the layers of one piece are looked at together"


async def test_a_body_that_takes_longer_than_blobs_are_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "LONGEST_S", -1.0)
    with pytest.raises(S3Error) as refused:
        await _body(_Content(b"x"), 1).whole(10)
    assert refused.value.code == "RequestTimeout"
