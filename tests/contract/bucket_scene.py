"""A bucket for contract tests: its names in Redis or in memory, its bytes in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis.asyncio as redis

from quire.model.buckets import GRACE_MS, UNCOMMITTED_MS
from quire.testing import FakeClock
from quire.testing.buckets import MemoryBuckets
from quire_gateway.adapters.blobs import ObstoreBlobs
from quire_gateway.s3 import ports
from quire_gateway.s3.backend import ObjectBackend
from quire_gateway.s3.backends import Backends
from quire_gateway.s3.body import Body
from quire_gateway.s3.checksums import BodyChecks
from quire_gateway.s3.declared import Described
from quire_server.redis import S3Buckets

PLAIN = Described({}, {})


class ReadBytes:
    """The reader of a request's body."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def readany(self) -> bytes:
        data, self._data = self._data, b""
        return data


def body(data: bytes) -> Body:
    return Body(ReadBytes(data), len(data), BodyChecks({}, ""), None)


class Scene:
    def __init__(self, client: redis.Redis | None, folder: Path) -> None:
        self.client = client
        self.folder = folder
        self.clock = FakeClock()
        buckets: ports.Buckets = S3Buckets(client) if client is not None else MemoryBuckets()
        self.buckets: Any = buckets
        self.blobs = ObstoreBlobs(str(folder), 5.0)
        self.backends = Backends(buckets=self.buckets, blobs=self.blobs, reserved={}, clock=self.clock)
        self.backend = ObjectBackend("t", "b", buckets=self.buckets, blobs=self.blobs, clock=self.clock)

    async def read(self, key: str) -> bytes:
        entry = await self.backend.head(key)
        assert entry is not None, key
        data = b"".join([bytes(piece) async for piece in self.backend.read(entry, 0, entry.size)])
        assert len(data) == entry.size
        return data

    async def later(self) -> None:
        """Wait, and sweep everything that may be removed."""
        await self.clock.advance((UNCOMMITTED_MS + GRACE_MS) / 1e3 * 2)
        await self.backends.sweep()

    async def lose(self, keys: list[str]) -> None:
        """Delete the entries of keys, and keep the keys."""
        if self.client is not None:
            await self.client.hdel("quire:s3:{t/b}:objects", *keys)
        else:
            self.buckets.lose("t", "b", keys)

    def files(self) -> int:
        return sum(1 for file in self.folder.rglob("*") if file.is_file())
