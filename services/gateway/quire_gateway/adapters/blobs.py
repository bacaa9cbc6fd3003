"""The object tier by obstore: bytes of S3 objects, and KV chunks. What is written once never changes."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError

from quire.model.chunk_object import object_path
from quire.model.errors import Unavailable
from quire_server.objects import open_store

_FOLDER = "s3"


class ObstoreBlobs:
    """The `Blobs` port."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._store = open_store(url, timeout_s, "QUIRE_GATEWAY_OBJECT_URL")

    def new_name(self) -> str:
        return secrets.token_hex(16)

    async def write(self, name: str, data: Any) -> None:
        async with _translated():
            await obstore.put_async(self._store, _path(name), data, use_multipart=False)

    async def read(self, name: str, start: int, end: int) -> memoryview:
        async with _translated():
            return memoryview(await obstore.get_range_async(self._store, _path(name), start=start, end=end))

    async def delete(self, name: str) -> None:
        async with _translated():
            with contextlib.suppress(NotFoundError, FileNotFoundError):
                await obstore.delete_async(self._store, _path(name))


class ObstoreChunks:
    """The `ChunkStore` port: KV chunks as the object tier has them."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._store = open_store(url, timeout_s, "QUIRE_GATEWAY_OBJECT_URL")

    async def head(self, key: bytes) -> tuple[int, float, str] | None:
        async with _translated():
            try:
                found = await obstore.head_async(self._store, object_path(key))
            except (NotFoundError, FileNotFoundError):
                return None
        return found["size"], found["last_modified"].timestamp(), found["e_tag"] or ""

    async def read(self, key: bytes, start: int, end: int) -> memoryview:
        async with _translated():
            return memoryview(await obstore.get_range_async(self._store, object_path(key), start=start, end=end))

    async def shard(self, first: str) -> list[tuple[str, int, float, str]]:
        found = []
        async with _translated():
            async for batch in obstore.list(self._store, prefix=f"chunks/{first}", chunk_size=1000):
                for each in batch:
                    name = each["path"].rpartition("/")[2]
                    found.append((name, each["size"], each["last_modified"].timestamp(), each["e_tag"] or ""))
        return sorted(found)

    async def write(self, key: bytes, data: bytes) -> None:
        async with _translated():
            await obstore.put_async(self._store, object_path(key), data)


def _path(name: str) -> str:
    return f"{_FOLDER}/{name[:2]}/{name}"


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise Unavailable(f"the object tier has not (any more) what was looked for: {error}") from error
    except (BaseError, OSError, ValueError) as error:
        raise Unavailable(f"the object tier: {type(error).__name__}: {str(error).splitlines()[0][:300]}") from error
