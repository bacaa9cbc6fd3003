"""The `ObjectTier` port on obstore: S3 and what speaks it, GCS, Azure, or a folder."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Final

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import LocalStore

from quire.model.chunk_object import (
    ObjectRange,
    compact_header,
    header_at_end,
    object_of_path,
    object_path,
    objects_folder,
)
from quire_server.objects import open_store
from quire_storage.errors import ObjectTierFailed, ObjectTierThrottled
from quire_storage.ports import ObjectName

_TAIL_BYTES = 8192
_HEADER: Final = "quireheader"
"""Name of the metadata; Azure takes letters and digits only."""
_HEADER_CHARS_MAX: Final = 1900
"""S3 takes 2 KiB of metadata."""
_BEYOND_END: Final = re.compile(r"InvalidRange|StartTooLarge|\b416\b")
_THROTTLED: Final = re.compile(r"\b(503|429)\b|SlowDown|TooManyRequests")


class ObstoreTier:
    """`url`: see `quire_server.objects.open_store`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.description = url
        self._store = open_store(url, timeout_s, "QUIRE_STORAGE_OBJECT_URL", prune=True)
        self._reads = open_store(url, timeout_s, "QUIRE_STORAGE_OBJECT_URL", attempts=1)
        self._keeps_metadata = not isinstance(self._store, LocalStore)

    async def put(self, name: ObjectName, data: bytes) -> None:
        """Write an object, and its header as metadata, so that one request reads the header and the first layer."""
        header = base64.b64encode(compact_header(header_at_end(data) or b"")).decode()
        is_kept = self._keeps_metadata and 0 < len(header) <= _HEADER_CHARS_MAX
        async with _translated():
            await obstore.put_async(
                self._store, object_path(*name), data, attributes={_HEADER: header} if is_kept else None
            )

    async def read(self, name: ObjectName, start: int, stop: int, *, described: bool = True) -> ObjectRange | None:
        path = object_path(*name)
        async with _translated():
            try:
                if not described:
                    data = await obstore.get_range_async(self._reads, path, start=start, end=stop)
                    return ObjectRange(memoryview(data))
                answer = await obstore.get_async(self._reads, path, options={"range": (start, stop)})
            except (NotFoundError, FileNotFoundError):
                return None
            except BaseError as error:
                if _BEYOND_END.search(str(error)):
                    return ObjectRange(memoryview(b""))
                raise
            header = None
            with contextlib.suppress(ValueError):
                header = base64.b64decode(str(answer.attributes.get(_HEADER, ""))) or None
            return ObjectRange(memoryview(await answer.bytes_async()), answer.meta["size"], header)

    async def get(self, name: ObjectName) -> bytes | None:
        async with _translated():
            try:
                response = await obstore.get_async(self._store, object_path(*name))
            except (NotFoundError, FileNotFoundError):
                return None
            return bytes(await response.bytes_async())

    async def delete(self, names: Sequence[ObjectName]) -> None:
        paths = [object_path(*name) for name in names]
        async with _translated():
            try:
                await obstore.delete_async(self._store, paths)
            except (NotFoundError, FileNotFoundError):  # a folder stops at the first that does not exist
                await asyncio.gather(*map(self._delete, paths))

    async def _delete(self, path: str) -> None:
        with contextlib.suppress(NotFoundError, FileNotFoundError):
            await obstore.delete_async(self._store, path)

    async def generations(self, key: bytes) -> list[int]:
        async with _translated():
            pages = obstore.list(self._store, prefix=objects_folder(key))
            objects = [attributes async for page in pages for attributes in page]
        objects.sort(key=lambda attributes: attributes["last_modified"], reverse=True)
        return [name[1] for attributes in objects if (name := object_of_path(str(attributes["path"]))) is not None]

    async def list(self) -> AsyncIterator[list[ObjectName]]:
        async with _translated():
            async for page in obstore.list(self._store, prefix="chunks/", chunk_size=1000):
                names = (object_of_path(str(entry["path"])) for entry in page)
                yield [name for name in names if name is not None]

    async def header(self, name: ObjectName) -> bytes | None:
        async with _translated():
            try:
                tail = await obstore.get_async(
                    self._store, object_path(*name), options={"range": {"suffix": _TAIL_BYTES}}
                )
            except (NotFoundError, FileNotFoundError):
                return None
            return header_at_end(bytes(await tail.bytes_async()))


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        failure = ObjectTierThrottled if _THROTTLED.search(str(error)) else ObjectTierFailed
        raise failure(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}") from error
