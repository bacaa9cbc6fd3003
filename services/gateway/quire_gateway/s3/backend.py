"""Backends of buckets. Ordinary ones contain the objects of clients; KV chunks and latents have buckets of their own.

A backend knows nothing of HTTP and nothing of the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from email.utils import formatdate
from typing import Any, Final, Protocol

from quire.model.buckets import (
    NULL_VERSION,
    Blob,
    Commit,
    CommitOutcome,
    DeleteOutcome,
    Deletion,
    MultipartUpload,
    ObjectPart,
    Page,
    StoredObject,
    UploadPart,
    VersionsPage,
)
from quire.model.policy import ENTRY_BYTES
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3.body import Body
from quire_gateway.s3.checksums import BodyChecks, combined_checksum
from quire_gateway.s3.declared import CompletedObject, Described, ExpectedObject
from quire_gateway.s3.ports import Blobs, Buckets, S3Quotas
from quire_server.clock import Clock

BLOB_BYTES: Final = 8 << 20
PART_BYTES_MIN: Final = 5 << 20


class Backend(Protocol):
    """The objects of one bucket, in order of the bytes of their keys."""

    async def check_there(self) -> None:
        """Check the bucket. Raises `S3Error` NoSuchBucket."""

    async def head(self, key: str) -> StoredObject | None:
        """Return an object's entry; None if there is no such key. Raises `S3Error` NoSuchBucket."""

    def read(self, entry: StoredObject, start: int, end: int) -> AsyncIterator[memoryview]: ...
    async def page(self, prefix: str, marker: str, past: bool, limit: int, delimiter: str = "") -> Page:
        """`delimiter`: the page may end at the first key that has it behind the prefix."""

    async def put(self, key: str, body: Body, described: Described, expected: str) -> StoredObject:
        """`expected`: "" for whatever is there, "absent", or its ETag; another makes ConditionalRequestConflict."""

    async def delete(self, key: str, etag: str) -> Deletion:
        """`etag`: "" or the one it must have."""


class ObjectBackend:
    """An ordinary bucket: names in Redis, bytes in the object tier, in blobs of up to 8 MiB.

    A write raises `QuotaExceeded`, if the tenant has `quotas`.
    """

    def __init__(
        self,
        tenant: str,
        bucket: str,
        *,
        buckets: Buckets,
        blobs: Blobs,
        clock: Clock,
        quotas: S3Quotas | None = None,
    ) -> None:
        self._at = (tenant, bucket)
        self._buckets = buckets
        self._blobs = blobs
        self._clock = clock
        self._quotas = quotas

    @property
    def place(self) -> tuple[str, str]:
        """Tenant and bucket."""
        return self._at

    async def check_there(self) -> None:
        if not await self._buckets.exists(*self._at):
            raise S3Error("NoSuchBucket", "The specified bucket does not exist")

    async def head(self, key: str) -> StoredObject | None:
        entry = await self.version(key)
        return entry if entry is not None and not entry.is_marker else None

    async def version(self, key: str, version_id: str = "") -> StoredObject | None:
        """Return an object, or a version of it; it may be a delete marker. Raises `S3Error` NoSuchBucket."""
        entry = await self._buckets.get(*self._at, key, version_id)
        if entry is None:
            await self.check_there()
        return entry

    async def found(self, key: str, version_id: str = "") -> StoredObject:
        """Return an object, or a version of it.

        Raises:
            S3Error: NoSuchKey, with a header if a delete marker is the newest version; NoSuchVersion; MethodNotAllowed
                for a version that is a delete marker; NoSuchBucket.
        """
        entry = await self.version(key, version_id)
        if entry is None:
            if version_id not in ("", NULL_VERSION):
                raise S3Error("NoSuchVersion", "The specified version does not exist.")
            raise S3Error("NoSuchKey", "The specified key does not exist.")
        if entry.is_marker:
            headers = {"x-amz-delete-marker": "true", "x-amz-version-id": entry.version_id or NULL_VERSION}
            if version_id:
                headers |= {"Allow": "DELETE", "Last-Modified": formatdate(entry.modified_s, usegmt=True)}
                raise S3Error("MethodNotAllowed", "The version is a delete marker", headers)
            raise S3Error("NoSuchKey", "The specified key does not exist.", headers)
        return entry

    async def versions(self, prefix: str, marker: str, version_id: str, past: bool, limit: int) -> VersionsPage:
        """See `Buckets.versions`."""
        page = await self._buckets.versions(*self._at, prefix, marker, version_id, past, limit)
        if not page.versions:
            await self.check_there()
        return page

    async def tag(self, key: str, version_id: str, tags: Mapping[str, str]) -> StoredObject:
        """Replace the tags of an object, or of a version; returns it. Raises as `found` does."""
        entry = await self.found(key, version_id)
        if not await self._buckets.tag(*self._at, key, entry.version_id or NULL_VERSION, tags):
            raise S3Error("NoSuchKey", "The specified key does not exist.")
        return entry

    async def page(self, prefix: str, marker: str, past: bool, limit: int, delimiter: str = "") -> Page:
        page = await self._buckets.page(*self._at, prefix, marker, past, limit, delimiter)
        if not page.last:
            await self.check_there()
        return page

    async def read(self, entry: StoredObject, start: int, end: int) -> AsyncIterator[memoryview]:
        """Yield the bytes in pieces of up to 8 MiB; the next one is fetched while this one is being sent."""
        reading: asyncio.Task[memoryview] | None = None
        try:
            for blob, first, last in _extents(entry.blobs, start, end):
                upcoming = asyncio.ensure_future(self._blobs.read(blob.name, first, last))
                if reading is not None:
                    piece, reading = await reading, upcoming
                    yield piece
                reading = upcoming
            if reading is not None:
                yield await reading
        finally:
            if reading is not None and not reading.done():
                reading.cancel()

    async def put(self, key: str, body: Body, described: Described, expected: str) -> StoredObject:
        async with self._room(body.length):
            blobs = await self._write(body)
            etag, checksums = await self._finished(body, blobs)
            entry = StoredObject(
                key,
                etag,
                size=body.size,
                modified_s=self._clock.now_ms() / 1e3,
                blobs=tuple(blobs),
                headers=described.headers,
                metadata=described.metadata,
                checksums=checksums,
                tags=described.tags,
            )
            return await self._commit(entry, expected)

    async def copy(
        self, key: str, entry: StoredObject, source: ObjectBackend, described: Described, expected: str, algorithm: str
    ) -> StoredObject:
        """Copy the source's `entry`, blob by blob; its ETag and checksum are of the whole.

        `algorithm`: of the checksum, in lower case; "" for that of the source.
        """
        checks, blobs = BodyChecks({}, ""), []
        checks.keep(algorithm or next(iter(entry.checksums), ""))
        async with self._room(entry.size):
            for blob in entry.blobs:
                piece = await source._blobs.read(blob.name, 0, blob.size)
                await asyncio.to_thread(checks.update, piece)
                written = await self._write_blob(piece)
                blobs.append(written)
            etag, checksums = checks.finish({})
            copied = StoredObject(
                key,
                etag,
                size=entry.size,
                modified_s=self._clock.now_ms() / 1e3,
                blobs=tuple(blobs),
                headers=described.headers,
                metadata=described.metadata,
                checksums=checksums,
                tags=described.tags,
            )
            return await self._commit(copied, expected)

    async def delete(self, key: str, etag: str) -> Deletion:
        """Delete an object; with versioning it becomes an older version. Raises `S3Error` PreconditionFailed."""
        deletion = await self._buckets.delete(*self._at, key, self._clock.now_ms(), etag)
        return _checked_deletion(deletion)

    async def delete_version(self, key: str, version_id: str) -> Deletion:
        """Delete a version for good."""
        return await self._buckets.delete_version(*self._at, key, version_id, self._clock.now_ms())

    async def delete_unchanged(self, version: StoredObject, *, for_good: bool, older: bool = False) -> Deletion:
        """Delete an object, or a version `for_good`, if it is still the one given.

        `older`: a version only while it is not the current one.

        Raises:
            S3Error: PreconditionFailed if another write has replaced it, even one of the same bytes.
        """
        now_ms, version_id = self._clock.now_ms(), version.version_id or NULL_VERSION
        if for_good:
            deletion = await self._buckets.delete_version(*self._at, version.key, version_id, now_ms, version, older)
        else:
            deletion = await self._buckets.delete(*self._at, version.key, now_ms, unchanged=version)
        return _checked_deletion(deletion)

    # ---- multipart

    async def start_upload(self, key: str, described: Described, algorithm: str = "", full_object: bool = False) -> str:
        """`algorithm`, `full_object`: see `MultipartUpload`."""
        upload_id, now_s = self._blobs.new_name(), self._clock.now_ms() / 1e3
        upload = MultipartUpload(
            key,
            upload_id,
            now_s,
            described.headers,
            described.metadata,
            algorithm=algorithm,
            full_object=full_object,
            tags=described.tags,
        )
        async with self._room(0):
            if not await self._buckets.start_upload(*self._at, upload):
                raise S3Error("NoSuchBucket", "The specified bucket does not exist")
        return upload_id

    async def upload(self, key: str, upload_id: str) -> MultipartUpload:
        """Return a multipart upload. Raises `S3Error` NoSuchUpload."""
        upload = await self._buckets.upload(*self._at, upload_id)
        if upload is None or upload.key != key:
            await self.check_there()
            raise S3Error("NoSuchUpload", "The specified multipart upload does not exist")
        return upload

    async def uploads(self) -> list[MultipartUpload]:
        return await self._buckets.uploads(*self._at)

    async def parts(self, key: str, upload_id: str) -> tuple[MultipartUpload, list[UploadPart]]:
        """Return an upload, and its parts by number. Raises `S3Error` NoSuchUpload."""
        upload, parts = await self._upload_and_parts(key, upload_id)
        return upload, sorted(parts.values(), key=lambda part: part.number)

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> UploadPart:
        """Store a part; it has a checksum of the upload's algorithm, whether the client has sent one or not."""
        body.keep_checksum((await self.upload(key, upload_id)).algorithm)
        async with self._room(body.length):
            blobs = await self._write(body)
            etag, checksums = await self._finished(body, blobs)
            return await self._commit_part(upload_id, number, etag, checksums, blobs)

    async def copy_part(
        self, key: str, upload_id: str, number: int, size: int, pieces: AsyncIterator[memoryview]
    ) -> UploadPart:
        """A part of that size out of what another object has."""
        checks = BodyChecks({}, "")
        checks.keep((await self.upload(key, upload_id)).algorithm)
        async with self._room(size):
            blobs = []
            async for piece in pieces:
                await asyncio.to_thread(checks.update, piece)
                written = await self._write_blob(piece)
                blobs.append(written)
            return await self._commit_part(upload_id, number, *checks.finish({}), blobs)

    async def was_completed(self, key: str, upload_id: str, part_names: Sequence[tuple[int, str]]) -> bool:
        """Whether the upload has become this object, of these parts, already: conditions were looked at then."""
        return await self._buckets.completed(*self._at, upload_id) == (key, _etag_of_parts(part_names))

    async def complete(
        self,
        key: str,
        upload_id: str,
        part_names: Sequence[tuple[int, str]],
        expected: str,
        declared: ExpectedObject | None = None,
    ) -> CompletedObject:
        """Make the object of these parts: nothing is copied. Raises `S3Error`.

        A repeated call with the same parts has the same answer. `declared`: compared with the object.
        """
        if [number for number, _ in part_names] != sorted({number for number, _ in part_names}):
            raise S3Error("InvalidPartOrder", "The list of parts was not in ascending order")
        etag = _etag_of_parts(part_names)
        try:
            entry, chosen = await self._object_of(key, upload_id, part_names, etag)
            if declared is not None:
                declared.check_parts(chosen)
                declared.check(entry)
            commit = await self._buckets.complete(*self._at, upload_id, entry, chosen, expected, self._clock.now_ms())
            _check(commit.outcome)
        except S3Error as error:
            if error.code != "NoSuchUpload" or await self._buckets.completed(*self._at, upload_id) != (key, etag):
                raise
            present = await self.head(key)
            if present is None or present.etag != etag:
                return CompletedObject(etag, {})
            return CompletedObject(etag, present.checksums, present.version_id)
        return CompletedObject(etag, entry.checksums, commit.version_id)

    async def _object_of(
        self, key: str, upload_id: str, part_names: Sequence[tuple[int, str]], etag: str
    ) -> tuple[StoredObject, list[UploadPart]]:
        """Return the object that an upload becomes, and its parts. Raises `S3Error`."""
        upload, parts = await self._upload_and_parts(key, upload_id)
        chosen = []
        for number, tag in part_names:
            part = parts.get(number)
            if part is None or part.etag != tag:
                raise S3Error("InvalidPart", f"Part {number} was not uploaded, or has another ETag")
            chosen.append(part)
        if any(part.size < PART_BYTES_MIN for part in chosen[:-1]):
            raise S3Error("EntityTooSmall", "All parts but the last have 5 MiB at least")
        size, blobs = sum(part.size for part in chosen), tuple(blob for part in chosen for blob in part.blobs)
        checksums = {}
        if upload.algorithm and all(upload.algorithm in part.checksums for part in chosen):
            checksums = {upload.algorithm: combined_checksum(upload.algorithm, upload.full_object, chosen)}
        return StoredObject(
            key,
            etag,
            size=size,
            modified_s=self._clock.now_ms() / 1e3,
            blobs=blobs,
            headers=upload.headers,
            metadata=upload.metadata,
            checksums=checksums,
            tags=upload.tags,
            parts=tuple(ObjectPart(part.number, part.size, part.checksums) for part in chosen),
        ), chosen

    async def _upload_and_parts(self, key: str, upload_id: str) -> tuple[MultipartUpload, dict[int, UploadPart]]:
        """The parts first: they go together with the upload, and are all of them if it is still there afterwards."""
        parts = await self._buckets.parts(*self._at, upload_id)
        return await self.upload(key, upload_id), parts

    async def abort(self, key: str, upload_id: str) -> None:
        await self.upload(key, upload_id)
        await self._buckets.abort(*self._at, upload_id, self._clock.now_ms())

    # ----

    async def _write(self, body: Body) -> list[Blob]:
        """Write its bytes, in blobs without a reference."""
        blobs: list[Blob] = []
        try:
            async for piece in body.pieces(BLOB_BYTES):
                written = await self._write_blob(piece)
                blobs.append(written)
        except BaseException:
            await asyncio.shield(self._abandon(blobs))
            raise
        return blobs

    def _room(self, more_bytes: int) -> AbstractAsyncContextManager[None]:
        """Reserve room for an entry and its bytes. Raises `QuotaExceeded`."""
        if self._quotas is None:
            return contextlib.nullcontext()
        return self._quotas.reserve(self._at[0], ENTRY_BYTES + more_bytes)

    async def _write_blob(self, piece: Any) -> Blob:
        blob = Blob(self._blobs.new_name(), len(piece))
        if not await self._buckets.will_write(*self._at, blob.name, self._clock.now_ms()):
            raise S3Error("NoSuchBucket", "The specified bucket does not exist")
        await self._blobs.write(blob.name, piece)
        return blob

    async def _abandon(self, blobs: Sequence[Blob]) -> None:
        await self._buckets.abandon(*self._at, [blob.name for blob in blobs], self._clock.now_ms())

    async def _finished(self, body: Body, blobs: Sequence[Blob]) -> tuple[str, dict[str, str]]:
        try:
            return body.finish()
        except S3Error:
            await self._abandon(blobs)
            raise

    async def _commit(self, entry: StoredObject, expected: str) -> StoredObject:
        """Commit an entry, and return it as a version; the blobs of a refused one are abandoned.

        If the outcome is unknown (Redis did not answer), they are left: they are deleted in a day, or are used.
        """
        commit: Commit = await self._buckets.put(*self._at, entry, expected, self._clock.now_ms())
        if commit.outcome is not CommitOutcome.COMMITTED:
            await self._abandon(entry.blobs)
        _check(commit.outcome)
        return replace(entry, version_id=commit.version_id)

    async def _commit_part(
        self, upload_id: str, number: int, etag: str, checksums: Mapping[str, str], blobs: Sequence[Blob]
    ) -> UploadPart:
        now_ms = self._clock.now_ms()
        part = UploadPart(number, etag, sum(blob.size for blob in blobs), now_ms / 1e3, tuple(blobs), checksums)
        outcome = await self._buckets.put_part(*self._at, upload_id, part, now_ms)
        if outcome is not CommitOutcome.COMMITTED:
            await self._abandon(blobs)
        _check(outcome)
        return part


def _etag_of_parts(part_names: Sequence[tuple[int, str]]) -> str:
    """Return the ETag of an object that is made of parts, by their ETags. Raises `S3Error` InvalidPart."""
    try:
        digests = b"".join(bytes.fromhex(tag) for _, tag in part_names)
    except ValueError:
        raise S3Error("InvalidPart", "An ETag is that of no part") from None
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(part_names)}"


_FAILURES: Final = {
    CommitOutcome.CONFLICT: ("ConditionalRequestConflict", "Another request has written this key meanwhile"),
    CommitOutcome.NO_BUCKET: ("NoSuchBucket", "The specified bucket does not exist"),
    CommitOutcome.BLOBS_GONE: ("RequestTimeout", "The upload took more than a day"),
    CommitOutcome.NO_UPLOAD: ("NoSuchUpload", "The upload does not exist: it may have been completed or aborted"),
    CommitOutcome.PART_CHANGED: ("InvalidPart", "A part was uploaded again meanwhile"),
}


def _check(outcome: CommitOutcome) -> None:
    """Raise `S3Error` for a commit that has failed."""
    if outcome is not CommitOutcome.COMMITTED:
        raise S3Error(*_FAILURES[outcome])


def _checked_deletion(deletion: Deletion) -> Deletion:
    if deletion.outcome is DeleteOutcome.CHANGED:
        raise S3Error("PreconditionFailed", "If-Match: the object has another ETag")
    return deletion


def _extents(blobs: Sequence[Blob], start: int, end: int) -> list[tuple[Blob, int, int]]:
    """Return the ranges of blobs that make [start, end) of them all."""
    extents, at = [], 0
    for blob in blobs:
        first, last = max(start - at, 0), min(end - at, blob.size)
        if first < last:
            extents.append((blob, first, last))
        at += blob.size
    return extents
