"""The object tier by obstore: bytes of S3 objects, and KV chunks. Written objects never change."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError

from quire.model.chunk_object import object_of_path, object_path, objects_folder
from quire.model.errors import Unavailable
from quire_gateway.ports import ChunkAttributes
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

    async def head(self, key: bytes) -> ChunkAttributes | None:
        async with _translated():
            pages = obstore.list(self._store, prefix=objects_folder(key))
            objects = [listed async for page in pages for listed in page]
            if not objects:
                with contextlib.suppress(NotFoundError, FileNotFoundError):
                    objects.append(await obstore.head_async(self._store, object_path(key, 0)))
        chunks = filter(None, map(_attributes, objects))
        return max(chunks, key=lambda chunk: chunk.modified_s, default=None)

    async def read(self, chunk: ChunkAttributes, start: int, end: int) -> memoryview:
        path = object_path(chunk.key, chunk.generation)
        async with _translated():
            return memoryview(await obstore.get_range_async(self._store, path, start=start, end=end))

    async def shard(self, first: str) -> list[ChunkAttributes]:
        newest: dict[bytes, ChunkAttributes] = {}
        async with _translated():
            async for batch in obstore.list(self._store, prefix=f"chunks/{first}", chunk_size=1000):
                for chunk in filter(None, map(_attributes, batch)):
                    if chunk.key not in newest or newest[chunk.key].modified_s < chunk.modified_s:
                        newest[chunk.key] = chunk
        return [newest[key] for key in sorted(newest)]

    async def write(self, key: bytes, data: bytes) -> None:
        generation = int.from_bytes(secrets.token_bytes(8), "big") | 1
        async with _translated():
            await obstore.put_async(self._store, object_path(key, generation), data)


def _attributes(listed: Any) -> ChunkAttributes | None:
    name = object_of_path(str(listed["path"]))
    if name is None:
        return None
    return ChunkAttributes(*name, listed["size"], listed["last_modified"].timestamp(), listed["e_tag"] or "")


def _path(name: str) -> str:
    return f"{_FOLDER}/{name[:2]}/{name}"


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise Unavailable(f"the object tier has no object of this name: {error}") from error
    except (BaseError, OSError, ValueError) as error:
        raise Unavailable(f"the object tier: {type(error).__name__}: {str(error).splitlines()[0][:300]}") from error
