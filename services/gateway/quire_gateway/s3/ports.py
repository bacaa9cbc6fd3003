"""Ports of the S3 frontend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from quire.model.buckets import (
    Commit,
    CommitOutcome,
    Deletion,
    MultipartUpload,
    Page,
    StoredObject,
    UploadPart,
    VersionsPage,
)


class Blobs(Protocol):
    """Immutable bytes in the object tier."""

    def new_name(self) -> str:
        """Return a new name."""

    async def write(self, name: str, data: Any) -> None: ...
    async def read(self, name: str, start: int, end: int) -> memoryview:
        """Read a blob. Raises `ChunkMissing`, `Unavailable`."""

    async def delete(self, name: str) -> None:
        """Delete a blob; a missing one is no error."""


class S3Quotas(Protocol):
    """Quotas of tenants."""

    def reserve(self, tenant: str, more_bytes: int) -> AbstractAsyncContextManager[None]:
        """Reserve room while bytes are written. Raises `QuotaExceeded`."""


class Buckets(Protocol):
    """Names of buckets, and the metadata and blobs of their objects; of all tenants."""

    async def create(self, tenant: str, bucket: str, created_s: float) -> bool:
        """Whether it is new."""

    async def exists(self, tenant: str, bucket: str) -> bool: ...

    async def drop(self, tenant: str, bucket: str, now_ms: int) -> bool:
        """Remove a bucket without objects and versions, with its unfinished uploads; whether it had none."""

    async def all(self, tenant: str) -> list[tuple[str, float]]:
        """Names and times of creation, in order."""

    async def settings(self, tenant: str, bucket: str) -> Mapping[str, bytes]:
        """Return a bucket's settings by name; empty too if it is not there."""

    async def setting(self, tenant: str, bucket: str, name: str) -> bytes | None:
        """Return one setting; None if it is not set, or the bucket is not there."""

    async def set(self, tenant: str, bucket: str, name: str, value: bytes) -> bool:
        """Set a setting, an empty value for none; whether the bucket is there.

        "versioning" has a value of `Versioning`; the others are the frontend's.
        """

    async def stored_bytes(self, tenant: str) -> int:
        """Return a tenant's charge in bytes.

        It counts objects, their older versions, parts and unremoved blobs, and `ENTRY_BYTES` for each object, version,
        delete marker, part, upload and bucket.
        """

    async def everywhere(self) -> list[tuple[str, str]]:
        """(tenant, bucket) of all; for the sweep."""

    async def put(self, tenant: str, bucket: str, entry: StoredObject, expected: str, now_ms: int) -> Commit:
        """Store an object under its key. If this raises, it may be stored or not.

        Args:
            tenant: Name of the tenant.
            bucket: Name of the bucket.
            entry: The object.
            expected: State of the key that it requires: "" for any, "absent", or an ETag.
            now_ms: Time, Unix epoch.
        """

    async def get(self, tenant: str, bucket: str, key: str, version_id: str = "") -> StoredObject | None:
        """Return an object, or a version of it by its id or "null"; both may be a delete marker."""

    async def delete(
        self,
        tenant: str,
        bucket: str,
        key: str,
        now_ms: int,
        etag: str = "",
        unchanged: StoredObject | None = None,
    ) -> Deletion:
        """Delete an object; with versioning it becomes an older version.

        Args:
            tenant: Name of the tenant.
            bucket: Name of the bucket.
            key: Of the object.
            now_ms: Time, Unix epoch.
            etag: That it must have; "" for any.
            unchanged: The object as it must be, time of the write included; None for any.
        """

    async def delete_version(
        self,
        tenant: str,
        bucket: str,
        key: str,
        version_id: str,
        now_ms: int,
        unchanged: StoredObject | None = None,
        older: bool = False,
    ) -> Deletion:
        """Delete a version for good; the newest that is left is the object then, unless it is a delete marker.

        `unchanged`: see `delete`. `older`: only while it is not the current version.
        """

    async def tag(self, tenant: str, bucket: str, key: str, version_id: str, tags: Mapping[str, str]) -> bool:
        """Replace the tags of an object, or of a version of it; whether it is there."""

    async def versions(
        self, tenant: str, bucket: str, prefix: str, marker: str, version_id: str, past: bool, limit: int
    ) -> VersionsPage:
        """Return versions of objects whose keys begin with `prefix`.

        Args:
            tenant: Name of the tenant.
            bucket: Name of the bucket.
            prefix: Of the keys; "" for all.
            marker: Key after which the page begins; "" for none.
            version_id: Version of that key after which the page begins, by its id or "null"; "" for its last one.
            past: Whether the page begins after all keys that begin with `marker`.
            limit: How many at most.
        """

    async def page(
        self, tenant: str, bucket: str, prefix: str, marker: str, past: bool, limit: int, delimiter: str = ""
    ) -> Page:
        """Up to `limit` objects whose keys begin with `prefix`, in order of their bytes, from after `marker`.

        `past`: after all keys that begin with `marker`, too. Fewer than there are if some are deleted at this moment.
        The page ends at the first key with the `delimiter` behind the prefix; nothing but its name is read.
        """

    async def will_write(self, tenant: str, bucket: str, blob: str, now_ms: int) -> bool:
        """Before a blob is written. Whether the bucket is there."""

    async def garbage(self, tenant: str, bucket: str, now_ms: int, limit: int) -> list[str]:
        """Return blobs that may be deleted."""

    async def abandon(self, tenant: str, bucket: str, blobs: Sequence[str], now_ms: int) -> None:
        """Nothing refers to these, nothing reads them."""

    async def removed(self, tenant: str, bucket: str, blobs: Sequence[str]) -> None: ...

    async def start_upload(self, tenant: str, bucket: str, upload: MultipartUpload) -> bool:
        """Whether the bucket is there."""

    async def upload(self, tenant: str, bucket: str, upload_id: str) -> MultipartUpload | None: ...

    async def uploads(self, tenant: str, bucket: str) -> list[MultipartUpload]:
        """Return the unfinished uploads, in order of key and time."""

    async def stale_uploads(self, tenant: str, bucket: str, before_s: float) -> list[str]:
        """Return the ids of uploads that were begun before a time (seconds since the Unix epoch)."""

    async def put_part(self, tenant: str, bucket: str, upload_id: str, part: UploadPart, now_ms: int) -> CommitOutcome:
        """Store a part; an earlier one with this number becomes garbage."""

    async def parts(self, tenant: str, bucket: str, upload_id: str) -> dict[int, UploadPart]:
        """Return the parts of an upload, by number."""

    async def complete(
        self,
        tenant: str,
        bucket: str,
        upload_id: str,
        entry: StoredObject,
        parts: Sequence[UploadPart],
        expected: str,
        now_ms: int,
    ) -> Commit:
        """Store the object that parts make, and end the upload. See `put`."""

    async def completed(self, tenant: str, bucket: str, upload_id: str) -> tuple[str, str] | None:
        """Key and ETag of the object that an upload became lately."""

    async def abort(self, tenant: str, bucket: str, upload_id: str, now_ms: int) -> bool:
        """Forget an upload, its parts are garbage; whether it was there."""

    async def forget_place(self, tenant: str, bucket: str) -> None:
        """Forget the place if the bucket is deleted and has no garbage: the sweep need not look there."""
