"""The object tier's store, opened by its URL; shared by the storage nodes (chunks) and the gateway (S3 objects)."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from quire.model.errors import ConfigInvalid


def open_store(url: str, timeout_s: float, variable: str, *, prune: bool = False, attempts: int = 3) -> Any:
    """Open a store.

    Args:
        url: `s3://bucket/prefix` (endpoint and keys from the usual AWS_* variables, plain http for an http
            endpoint), `gs://`, `az://`, or a folder.
        timeout_s: Of a request, seconds.
        variable: Named by `ConfigInvalid`.
        attempts: For a request that fails.
        prune: Remove folders that become empty by a deletion. A PUT at the same time may fail, and has to be repeated.

    Raises:
        ConfigInvalid: The URL names no store.
    """
    try:
        if "://" not in url:
            return LocalStore(str(Path(url).absolute()), mkdir=True, automatic_cleanup=prune)
        timeout = timedelta(seconds=timeout_s)
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "") or os.environ.get("AWS_ENDPOINT", "")
        options: Any = {"timeout": timeout, "allow_http": endpoint.startswith("http://")}
        retries: Any = {"max_retries": attempts - 1, "retry_timeout": timeout}
        return from_url(url, client_options=options, retry_config=retries)
    except (BaseError, ValueError, OSError) as error:
        raise ConfigInvalid(f"{variable}={url!r}: {error}") from None
