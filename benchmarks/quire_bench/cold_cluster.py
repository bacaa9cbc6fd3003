"""A cluster of one storage node whose chunks are in an object tier behind a link of a chosen latency."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import obstore

from quire.model.errors import InvalidRequest
from quire_bench.bare_reads import open_bare
from quire_bench.slow_link import SlowLink
from quire_tools.local import LocalCluster

_SLAB_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class ColdCluster:
    """`place`: of its objects; `endpoint`: of the S3 server as the node sees it, empty for a folder."""

    cluster: LocalCluster
    place: str
    endpoint: str


def endpoint_of(url: str, *, is_delayed: bool) -> str:
    """Return the S3 endpoint that is configured, or "".

    Args:
        url: Of the object tier, as s3://bucket/prefix; empty for a folder.
        is_delayed: Whether requests are to be delayed.

    Raises:
        InvalidRequest: Requests are to be delayed, and there is no endpoint.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "") if url else ""
    if is_delayed and not (url.startswith("s3://") and endpoint.startswith("http://")):
        raise InvalidRequest("delays need an s3:// URL and an http:// AWS_ENDPOINT_URL", field="object_url")
    return endpoint


@contextmanager
def cold_cluster(
    url: str, link: SlowLink, payload_bytes: int, chunk_bytes: int, settings: Mapping[str, str] | None = None
) -> Iterator[ColdCluster]:
    """Start a cluster without drives, with memory for two and a half payloads: one delivery may fill half of it.

    Its objects are removed in the end.
    """
    slab = max(_SLAB_BYTES, chunk_bytes)
    with tempfile.TemporaryDirectory() as folder, link:
        place = f"{url.rstrip('/')}/{os.urandom(6).hex()}" if url else f"{folder}/objects"
        own = {
            **(settings or {}),
            "QUIRE_STORAGE_SLAB_BYTES": str(slab),
            "QUIRE_STORAGE_ARENA_BYTES": str((5 * payload_bytes // (2 * slab) + 4) * slab),
            "QUIRE_STORAGE_DRIVES": "",
            "QUIRE_STORAGE_OBJECT_URL": place,
            **({"AWS_ENDPOINT_URL": link.address} if link.address else {}),
        }
        try:
            with LocalCluster(Path(folder), settings=own) as cluster:
                yield ColdCluster(cluster, place, link.address)
        finally:
            store = open_bare(place, link.address)
            for page in obstore.list(store):
                obstore.delete(store, [str(entry["path"]) for entry in page])
