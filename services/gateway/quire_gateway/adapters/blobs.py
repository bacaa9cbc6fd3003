"""Bytes of S3 objects in the object tier, by obstore. A blob is written once, whole, and never changed."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError

from quire.errors import ChunkMissing, Unavailable
from quire.objects import open_store

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

    async def delete(self, names: Sequence[str]) -> None:
        async with _translated():
            with contextlib.suppress(NotFoundError, FileNotFoundError):
                await obstore.delete_async(self._store, [_path(name) for name in names])


def _path(name: str) -> str:
    return f"{_FOLDER}/{name[:2]}/{name}"


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise ChunkMissing(f"the object tier has no {error}") from error
    except (BaseError, OSError, ValueError) as error:
        raise Unavailable(f"the object tier: {type(error).__name__}: {str(error).splitlines()[0][:300]}") from error
