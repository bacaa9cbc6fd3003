"""Buckets and the objects in them, for the S3 frontend: names, metadata, and the bytes of each.

Buckets belong to a tenant, and a name is a tenant's own: no tenant sees another's, or can tell that it exists. An
object is a list of blobs in the object tier. A blob without a reference is in the bucket's list of garbage, with the
time from which on it may be deleted: it is listed there before it is written, and taken out when an object refers to
it, so that nothing that dies half-way leaves bytes behind for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

GRACE_MS: Final = 300_000  # a reader may still be at a blob that was replaced, and is given more for each that it has
UNCOMMITTED_MS: Final = 86_400_000
COMPLETED_MS: Final = 86_400_000  # so long a completed upload can be completed again, by a client that heard no answer


class CommitOutcome(Enum):
    """End of a commit: of an object, of a part, or of an upload. The numbers are those of the scripts in Redis."""

    COMMITTED = 1
    CONFLICT = 0
    """Another request has written the key."""
    NO_BUCKET = -1
    BLOBS_GONE = -2
    """They were not committed within a day, and removed."""
    NO_UPLOAD = -3
    PART_CHANGED = -4
    """A part was uploaded again."""


class DeleteOutcome(Enum):
    """End of the deletion of an object. The numbers are those of the script in Redis."""

    DELETED = 1
    MISSING = 0
    CHANGED = -1
    """The object has another ETag."""


class Versioning(Enum):
    """Whether a bucket keeps the versions that its objects had. The values are S3's."""

    NEVER = ""
    ENABLED = "Enabled"
    SUSPENDED = "Suspended"
    """Writes replace the version "null"; others are kept."""


NULL_VERSION: Final = "null"
"""S3's name of what was written while versioning was not enabled."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """Effect of a deletion.

    Attributes:
        outcome: Its end.
        version_id: Of the delete marker that was made, or of the version that was deleted; "" without versioning.
        is_marker: Whether that version is, or was, a delete marker.
    """

    outcome: DeleteOutcome
    version_id: str = ""
    is_marker: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """End of a commit. `version_id`: of the version that it made; "" for the version "null"."""

    outcome: CommitOutcome
    version_id: str = ""


@dataclass(frozen=True, slots=True)
class Blob:
    """A range of bytes in the object tier."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """A part that an object was uploaded in. `checksums` by algorithm, base64."""

    number: int
    size: int
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a bucket, or a version of it.

    Attributes:
        key: Its key.
        etag: Without quotes; "" for a delete marker.
        size: Bytes.
        modified_s: Time of the write, Unix epoch.
        blobs: Its bytes, in order.
        headers: As the client gave them.
        metadata: As the client gave it.
        checksums: By algorithm, base64, of the whole object; empty if unknown. With a number of parts behind a hyphen
            they are of the parts' checksums.
        tags: Set with the object or later, in order.
        parts: Parts that it was uploaded in; empty if it was not.
        version_id: "" for the version "null".
    """

    key: str
    etag: str
    size: int
    modified_s: float
    blobs: tuple[Blob, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[ObjectPart, ...] = ()
    version_id: str = ""

    @property
    def is_marker(self) -> bool:
        """Whether this is a delete marker, an entry without bytes that hides the older versions."""
        return not self.etag


@dataclass(frozen=True, slots=True)
class VersionsPage:
    """A page of a bucket's versions, in order of the keys, of each key the newest first.

    Attributes:
        versions: With delete markers.
        latest: Of each, whether it is the newest of its key.
        truncated: Whether further versions may follow.
    """

    versions: list[StoredObject]
    latest: list[bool]
    truncated: bool


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing. `last`: the last key that was looked at, whether or not its object is among `objects`.

    `pause`: the listing reached its bound on inspected objects, and the client requests the rest. `common`: the first
    key with the delimiter, at which the page ends; its object was not read.
    """

    objects: list[StoredObject]
    last: str
    more: bool
    pause: bool = False
    common: str = ""


@dataclass(frozen=True, slots=True)
class MultipartUpload:
    """A multipart upload that is under way.

    `algorithm`: of the object's checksum, in lower case; "" for none. `full_object`: it is of the object's bytes, else
    composite, of its parts' checksums. `tags`: those of the object.
    """

    key: str
    upload_id: str
    started_s: float
    headers: Mapping[str, str]
    metadata: Mapping[str, str]
    algorithm: str = ""
    full_object: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UploadPart:
    """A part of an upload. `checksums` by algorithm, base64."""

    number: int
    etag: str
    size: int
    modified_s: float
    blobs: tuple[Blob, ...]
    checksums: Mapping[str, str] = field(default_factory=dict)
