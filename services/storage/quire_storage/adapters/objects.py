"""The `ObjectTier` port on obstore: S3 and what speaks it, GCS, Azure, or a folder."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Sequence

import obstore
from obstore.exceptions import BaseError, NotFoundError

from quire.model.chunk_object import header_at_end, object_path
from quire_server.objects import open_store
from quire_storage.errors import ObjectTierFailed

_CHUNK_NAME = re.compile("[0-9a-f]{64}")
_TAIL_BYTES = 8192


class ObstoreTier:
    """`url`: see `quire_server.objects.open_store`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.description = url
        self._store = open_store(url, timeout_s, "QUIRE_STORAGE_OBJECT_URL")

    async def put(self, key: bytes, data: bytes) -> None:
        async with _translated():
            await obstore.put_async(self._store, object_path(key), data)

    async def get(self, key: bytes) -> bytes | None:
        async with _translated():
            try:
                found = await obstore.get_async(self._store, object_path(key))
            except (NotFoundError, FileNotFoundError):
                return None
            return bytes(await found.bytes_async())

    async def delete(self, keys: Sequence[bytes]) -> None:
        async with _translated():
            with contextlib.suppress(NotFoundError, FileNotFoundError):
                await obstore.delete_async(self._store, [object_path(key) for key in keys])

    async def list(self) -> AsyncIterator[list[bytes]]:
        async with _translated():
            async for page in obstore.list(self._store, prefix="chunks/", chunk_size=1000):
                names = [str(entry["path"]).rpartition("/")[2] for entry in page]
                yield [bytes.fromhex(name) for name in names if _CHUNK_NAME.fullmatch(name)]

    async def header(self, key: bytes) -> bytes | None:
        async with _translated():
            try:
                tail = await obstore.get_async(
                    self._store, object_path(key), options={"range": {"suffix": _TAIL_BYTES}}
                )
            except (NotFoundError, FileNotFoundError):
                return None
            return header_at_end(bytes(await tail.bytes_async()))


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise ObjectTierFailed(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}") from error
