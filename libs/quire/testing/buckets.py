"""Buckets in memory: what `quire_server.redis.Buckets` does in Redis, by the same contract suite."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quire.model import buckets as rules
from quire.model.buckets import (
    NULL_VERSION,
    Blob,
    Commit,
    CommitOutcome,
    DeleteOutcome,
    Deletion,
    MultipartUpload,
    Page,
    StoredObject,
    UploadPart,
    Versioning,
    VersionsPage,
)
from quire.model.policy import ENTRY_BYTES

_MORE_EACH_MS = 10_000  # for each blob of an object that is replaced


@dataclass(slots=True)
class _Bucket:
    """State of a bucket.

    Attributes:
        older: By key, the versions that are no current ones, and all delete markers, the newest first.
        garbage: Unreferenced blobs, with the earliest time of their removal.
        waste: The bytes of those that objects and parts referred to.
    """

    there: bool = False
    objects: dict[str, StoredObject] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    older: dict[str, list[StoredObject]] = field(default_factory=dict)
    settings: dict[str, bytes] = field(default_factory=dict)
    garbage: dict[str, int] = field(default_factory=dict)
    waste: dict[str, int] = field(default_factory=dict)
    uploads: dict[str, MultipartUpload] = field(default_factory=dict)
    parts: dict[str, dict[int, UploadPart]] = field(default_factory=dict)
    completed: dict[str, tuple[str, str]] = field(default_factory=dict)

    def discard(self, blobs: Sequence[Blob], at_ms: int) -> None:
        for blob in blobs:
            self.garbage[blob.name] = at_ms + _MORE_EACH_MS * len(blobs)
            self.waste[blob.name] = blob.size

    def fits(self, key: str, expected: str) -> bool:
        previous = self.objects.get(key)
        if expected == "absent":
            return previous is None
        return not expected or (previous is not None and previous.etag == expected)

    def commit(self, blobs: Iterable[Blob]) -> bool:
        """Take blobs out of the garbage; False, and nothing, if one of them has been removed."""
        names = [blob.name for blob in blobs]
        if not all(name in self.garbage for name in names):
            return False
        for name in names:
            del self.garbage[name]
        return True

    @property
    def versioning(self) -> Versioning:
        return Versioning(self.settings.get("versioning", b"").decode())

    def step_back(self, key: str, grace_ms: int) -> str:
        """Make room for a new version, and return its id."""
        current, state = self.objects.pop(key, None), self.versioning
        self.keys.discard(key)
        older = self.older.setdefault(key, [])
        if current is not None:
            older.insert(0, current)
        if state is not Versioning.ENABLED:
            for version in [version for version in older if not version.version_id]:
                older.remove(version)
                self.discard(version.blobs, grace_ms)
        return secrets.token_hex(16) if state is Versioning.ENABLED else ""

    def store(self, entry: StoredObject, grace_ms: int) -> str:
        """Return the id of the version, "" for "null"."""
        version_id = self.step_back(entry.key, grace_ms)
        self.objects[entry.key] = replace(entry, version_id=version_id)
        self.keys.add(entry.key)
        return version_id

    def promote(self, key: str) -> None:
        older = self.older.get(key, [])
        if key not in self.objects and older and not older[0].is_marker:
            self.objects[key] = older.pop(0)
            self.keys.add(key)

    def all_versions(self, key: str) -> list[StoredObject]:
        return [*([self.objects[key]] if key in self.objects else []), *self.older.get(key, [])]


class MemoryBuckets:
    """Buckets of all tenants. Every method takes effect at once."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._created: dict[str, dict[str, float]] = {}
        self._places: set[tuple[str, str]] = set()

    def _of(self, tenant: str, bucket: str) -> _Bucket:
        return self._buckets.setdefault((tenant, bucket), _Bucket())

    # ---- buckets

    async def create(self, tenant: str, bucket: str, created_s: float) -> bool:
        state = self._of(tenant, bucket)
        new, state.there = not state.there, True
        self._created.setdefault(tenant, {}).setdefault(bucket, created_s)
        self._places.add((tenant, bucket))
        return new

    async def exists(self, tenant: str, bucket: str) -> bool:
        return self._of(tenant, bucket).there

    async def drop(self, tenant: str, bucket: str, now_ms: int) -> bool:
        state = self._of(tenant, bucket)
        if state.objects or any(state.older.values()):
            return False
        for upload_id in list(state.uploads):
            await self.abort(tenant, bucket, upload_id, now_ms)
        state.there = False
        state.waste.clear()
        state.settings.clear()
        self._created.get(tenant, {}).pop(bucket, None)
        return True

    async def all(self, tenant: str) -> list[tuple[str, float]]:
        return sorted(self._created.get(tenant, {}).items())

    async def everywhere(self) -> list[tuple[str, str]]:
        return sorted(self._places)

    async def settings(self, tenant: str, bucket: str) -> dict[str, bytes]:
        return dict(self._of(tenant, bucket).settings)

    async def setting(self, tenant: str, bucket: str, name: str) -> bytes | None:
        return self._of(tenant, bucket).settings.get(name)

    async def set(self, tenant: str, bucket: str, name: str, value: bytes) -> bool:
        state = self._of(tenant, bucket)
        if state.there:
            state.settings[name] = value
            if not value:
                del state.settings[name]
        return state.there

    async def stored_bytes(self, tenant: str) -> int:
        owned = [state for (owner, _), state in self._buckets.items() if owner == tenant]
        parts = [part for state in owned for upload in state.parts.values() for part in upload.values()]
        objects: list[StoredObject] = [entry for state in owned for entry in state.objects.values()]
        objects += [version for state in owned for versions in state.older.values() for version in versions]
        waste = [size for state in owned for size in state.waste.values()]
        entries = len(parts) + len(objects) + len(self._created.get(tenant, {}))
        entries += sum(len(state.uploads) for state in owned)
        return (
            ENTRY_BYTES * entries + sum(part.size for part in parts) + sum(entry.size for entry in objects) + sum(waste)
        )

    async def forget_place(self, tenant: str, bucket: str) -> None:
        state = self._of(tenant, bucket)
        if not state.there and not state.garbage:
            self._places.discard((tenant, bucket))

    # ---- objects

    async def put(self, tenant: str, bucket: str, entry: StoredObject, expected: str, now_ms: int) -> Commit:
        state = self._of(tenant, bucket)
        if not state.there:
            return Commit(CommitOutcome.NO_BUCKET)
        if not state.fits(entry.key, expected):
            return Commit(CommitOutcome.CONFLICT)
        if not state.commit(entry.blobs):
            return Commit(CommitOutcome.BLOBS_GONE)
        return Commit(CommitOutcome.COMMITTED, state.store(entry, now_ms + rules.GRACE_MS))

    async def get(self, tenant: str, bucket: str, key: str, version_id: str = "") -> StoredObject | None:
        stored_id = "" if version_id == NULL_VERSION else version_id
        versions = self._of(tenant, bucket).all_versions(key)
        return next((version for version in versions if not version_id or version.version_id == stored_id), None)

    async def delete(
        self,
        tenant: str,
        bucket: str,
        key: str,
        now_ms: int,
        etag: str = "",
        unchanged: StoredObject | None = None,
    ) -> Deletion:
        state = self._of(tenant, bucket)
        previous = state.objects.get(key)
        if previous is None and (etag or unchanged is not None or state.versioning is Versioning.NEVER):
            return Deletion(DeleteOutcome.MISSING)
        if previous is not None and (etag not in ("", previous.etag) or unchanged not in (None, previous)):
            return Deletion(DeleteOutcome.CHANGED)
        version_id = state.step_back(key, now_ms + rules.GRACE_MS)
        if state.versioning is Versioning.NEVER:
            return Deletion(DeleteOutcome.DELETED)
        marker = StoredObject(key, "", size=0, modified_s=now_ms / 1e3, blobs=(), version_id=version_id)
        state.older[key].insert(0, marker)
        return Deletion(DeleteOutcome.DELETED, version_id or NULL_VERSION, is_marker=True)

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
        state, version = self._of(tenant, bucket), await self.get(tenant, bucket, key, version_id)
        if version is None:
            return Deletion(DeleteOutcome.MISSING, version_id)
        if unchanged not in (None, version) or (older and state.objects.get(key) is version):
            return Deletion(DeleteOutcome.CHANGED, version_id)
        if state.objects.get(key) is version:
            del state.objects[key]
            state.keys.discard(key)
        else:
            state.older[key].remove(version)
        state.discard(version.blobs, now_ms + rules.GRACE_MS)
        state.promote(key)
        return Deletion(DeleteOutcome.DELETED, version_id, version.is_marker)

    async def tag(self, tenant: str, bucket: str, key: str, version_id: str, tags: Mapping[str, str]) -> bool:
        state, version = self._of(tenant, bucket), await self.get(tenant, bucket, key, version_id)
        if version is None:
            return False
        tagged = replace(version, tags=dict(tags))
        if state.objects.get(key) is version:
            state.objects[key] = tagged
        else:
            state.older[key][state.older[key].index(version)] = tagged
        return True

    async def versions(
        self, tenant: str, bucket: str, prefix: str, marker: str, version_id: str, past: bool, limit: int
    ) -> VersionsPage:
        state = self._of(tenant, bucket)
        listed: list[tuple[StoredObject, bool]] = []
        predecessor = await self.get(tenant, bucket, marker, version_id) if version_id and not past else None
        for key in sorted({*state.keys, *state.older}, key=str.encode):
            every = [(version, at == 0) for at, version in enumerate(state.all_versions(key))]
            if not key.startswith(prefix) or (past and key.startswith(marker)) or key.encode() < marker.encode():
                continue
            if key == marker and marker:
                of_key = [version for version, _ in every]
                every = every[of_key.index(predecessor) + 1 :] if predecessor is not None else []
            listed += every
        page = listed[:limit]
        return VersionsPage([version for version, _ in page], [latest for _, latest in page], len(page) >= limit)

    async def page(
        self, tenant: str, bucket: str, prefix: str, marker: str, past: bool, limit: int, delimiter: str = ""
    ) -> Page:
        state, low, first = self._of(tenant, bucket), marker.encode(), prefix.encode()
        beyond = low + b"\xff" if past else low
        skipping = bool(marker) and (marker >= prefix or past)
        inside = [key for key in state.keys if key.encode().startswith(first)]
        keys = sorted((key for key in inside if not skipping or key.encode() > beyond), key=str.encode)[:limit]
        common = next((key for key in keys if delimiter and key.find(delimiter, len(prefix)) >= 0), "")
        single = keys[: keys.index(common)] if common else keys
        objects = [state.objects[key] for key in single if key in state.objects]
        return Page(objects, keys[-1] if keys else "", more=len(keys) >= limit, common=common)

    def lose(self, tenant: str, bucket: str, keys: Sequence[str]) -> None:
        """Delete the metadata of keys but not the keys, as if they were deleted between a listing's two reads."""
        for key in keys:
            del self._of(tenant, bucket).objects[key]

    # ---- blobs

    async def will_write(self, tenant: str, bucket: str, blob: str, now_ms: int) -> bool:
        state = self._of(tenant, bucket)
        if state.there:
            state.garbage[blob] = now_ms + rules.UNCOMMITTED_MS
        return state.there

    async def garbage(self, tenant: str, bucket: str, now_ms: int, limit: int) -> list[str]:
        expired = sorted((at_ms, blob) for blob, at_ms in self._of(tenant, bucket).garbage.items() if at_ms <= now_ms)
        return [blob for _, blob in expired[:limit]]

    async def abandon(self, tenant: str, bucket: str, blobs: Sequence[str], now_ms: int) -> None:
        self._of(tenant, bucket).garbage.update(dict.fromkeys(blobs, now_ms))

    async def removed(self, tenant: str, bucket: str, blobs: Sequence[str]) -> None:
        for blob in blobs:
            self._of(tenant, bucket).garbage.pop(blob, None)
            self._of(tenant, bucket).waste.pop(blob, None)

    # ---- multipart uploads

    async def start_upload(self, tenant: str, bucket: str, upload: MultipartUpload) -> bool:
        state = self._of(tenant, bucket)
        if state.there:
            state.uploads[upload.upload_id] = upload
        return state.there

    async def upload(self, tenant: str, bucket: str, upload_id: str) -> MultipartUpload | None:
        return self._of(tenant, bucket).uploads.get(upload_id)

    async def stale_uploads(self, tenant: str, bucket: str, before_s: float) -> list[str]:
        return [upload.upload_id for upload in await self.uploads(tenant, bucket) if upload.started_s < before_s]

    async def uploads(self, tenant: str, bucket: str) -> list[MultipartUpload]:
        return sorted(self._of(tenant, bucket).uploads.values(), key=lambda upload: (upload.key, upload.started_s))

    async def put_part(self, tenant: str, bucket: str, upload_id: str, part: UploadPart, now_ms: int) -> CommitOutcome:
        state = self._of(tenant, bucket)
        if upload_id not in state.uploads:
            return CommitOutcome.NO_UPLOAD
        if not state.commit(part.blobs):
            return CommitOutcome.BLOBS_GONE
        parts = state.parts.setdefault(upload_id, {})
        previous = parts.get(part.number)
        parts[part.number] = part
        if previous is not None:
            state.discard(previous.blobs, now_ms + rules.GRACE_MS)
        return CommitOutcome.COMMITTED

    async def parts(self, tenant: str, bucket: str, upload_id: str) -> dict[int, UploadPart]:
        return dict(self._of(tenant, bucket).parts.get(upload_id, {}))

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
        state = self._of(tenant, bucket)
        uploaded = state.parts.get(upload_id, {})
        if not state.there:
            return Commit(CommitOutcome.NO_BUCKET)
        if upload_id not in state.uploads:
            return Commit(CommitOutcome.NO_UPLOAD)
        if not state.fits(entry.key, expected):
            return Commit(CommitOutcome.CONFLICT)
        if any(uploaded.get(part.number) != part for part in parts):
            return Commit(CommitOutcome.PART_CHANGED)
        version_id = state.store(entry, now_ms + rules.GRACE_MS)
        chosen = {part.number for part in parts}
        for number, part in uploaded.items():
            if number not in chosen:
                state.discard(part.blobs, now_ms + rules.GRACE_MS)
        state.parts.pop(upload_id, None)
        del state.uploads[upload_id]
        state.completed[upload_id] = (entry.key, entry.etag)
        return Commit(CommitOutcome.COMMITTED, version_id)

    async def completed(self, tenant: str, bucket: str, upload_id: str) -> tuple[str, str] | None:
        return self._of(tenant, bucket).completed.get(upload_id)

    async def abort(self, tenant: str, bucket: str, upload_id: str, now_ms: int) -> bool:
        state = self._of(tenant, bucket)
        for part in state.parts.pop(upload_id, {}).values():
            state.discard(part.blobs, now_ms)
        return state.uploads.pop(upload_id, None) is not None
