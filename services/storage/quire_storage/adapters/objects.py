"""The `ObjectTier` port on obstore: S3 and what speaks it, GCS, Azure, or a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import LocalStore, from_url

from quire.errors import ConfigInvalid
from quire_storage.errors import ObjectTierFailed

_PREFIX = "chunks"


class ObstoreTier:
    """`url`: `s3://bucket/prefix` (endpoint and keys from the usual AWS_* variables, plain http if the
    endpoint says so), `gs://`, `az://`, or a folder."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.description = url
        try:
            if "://" not in url:
                self._store: Any = LocalStore(str(Path(url).absolute()), mkdir=True)
            else:
                timeout = timedelta(seconds=timeout_s)
                endpoint = os.environ.get("AWS_ENDPOINT_URL", "") or os.environ.get("AWS_ENDPOINT", "")
                options: Any = {"timeout": timeout, "allow_http": endpoint.startswith("http://")}
                retries: Any = {"max_retries": 2, "retry_timeout": timeout}
                self._store = from_url(url, client_options=options, retry_config=retries)
        except (BaseError, ValueError, OSError) as error:
            raise ConfigInvalid(f"QUIRE_STORAGE_OBJECT_URL={url!r}: {error}") from None

    async def put(self, key: bytes, data: bytes) -> None:
        async with _translated():
            await obstore.put_async(self._store, _path(key), data)

    async def get(self, key: bytes) -> bytes | None:
        async with _translated():
            try:
                found = await obstore.get_async(self._store, _path(key))
            except (NotFoundError, FileNotFoundError):
                return None
            return bytes(await found.bytes_async())

    async def delete(self, keys: Sequence[bytes]) -> None:
        async with _translated():
            with contextlib.suppress(NotFoundError, FileNotFoundError):
                await obstore.delete_async(self._store, [_path(key) for key in keys])


def _path(key: bytes) -> str:
    name = key.hex()
    return f"{_PREFIX}/{name[:2]}/{name}"


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise ObjectTierFailed(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}") from error
