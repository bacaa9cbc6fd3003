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


@dataclass(frozen=True, slots=True)
class Blob:
    """A range of bytes in the object tier."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a bucket. `etag` without quotes; `headers` and `metadata` as the client gave them.

    `checksums` by algorithm, base64, of the whole object; empty if unknown. With a number of parts behind a hyphen they
    are of the parts' checksums.
    """

    key: str
    etag: str
    size: int
    modified_s: float
    blobs: tuple[Blob, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)


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
    composite, of its parts' checksums.
    """

    key: str
    upload_id: str
    started_s: float
    headers: Mapping[str, str]
    metadata: Mapping[str, str]
    algorithm: str = ""
    full_object: bool = False


@dataclass(frozen=True, slots=True)
class UploadPart:
    """A part of an upload. `checksums` by algorithm, base64."""

    number: int
    etag: str
    size: int
    modified_s: float
    blobs: tuple[Blob, ...]
    checksums: Mapping[str, str] = field(default_factory=dict)
