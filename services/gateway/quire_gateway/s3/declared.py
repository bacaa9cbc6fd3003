"""Declarations of clients about objects: headers, metadata, tags, and the object that parts make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.model.buckets import StoredObject, UploadPart
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3.checksums import kind_of


@dataclass(frozen=True, slots=True)
class Described:
    """Description of an object by its client, besides its bytes."""

    headers: Mapping[str, str]
    metadata: Mapping[str, str]
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExpectedObject:
    """Size and checksums, declared by a client, of the object that its parts make.

    Attributes:
        size: Bytes; None if it says nothing.
        parts: Checksums of parts, by their numbers and by algorithm, base64.
        checksums: Of the object, by algorithm.
        checksum_type: `COMPOSITE`, `FULL_OBJECT`, or "".
    """

    size: int | None = None
    parts: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = ""

    def check_parts(self, parts: Sequence[UploadPart]) -> None:
        """Compare checksums of parts; those of the release before have none. Raises `S3Error`."""
        for part in parts:
            for name, value in self.parts.get(part.number, {}).items():
                if part.checksums.get(name, value) != value:
                    raise S3Error("InvalidPart", f"Part {part.number} has another {name.upper()}")

    def check(self, entry: StoredObject) -> None:
        """Compare size and checksums. Raises `S3Error`."""
        if self.size is not None and entry.size != self.size:
            raise S3Error("InvalidRequest", f"The parts have {entry.size} bytes, x-amz-mp-object-size is {self.size}")
        if entry.checksums and self.checksum_type and self.checksum_type.upper() != kind_of(entry.checksums):
            raise S3Error("InvalidRequest", f"The upload's checksum type is {kind_of(entry.checksums)}")
        for name, value in self.checksums.items():
            if name not in entry.checksums:
                raise S3Error("InvalidRequest", f"The upload, or a part of it, was made without {name.upper()}")
            if value.partition("-")[0] != entry.checksums[name].partition("-")[0]:
                raise S3Error("BadDigest", f"The {name.upper()} you specified did not match the calculated checksum.")


@dataclass(frozen=True, slots=True)
class CompletedObject:
    """ETag and checksums of an object that was made of parts. `version_id`: "" if it is not known, or there is none."""

    etag: str
    checksums: Mapping[str, str]
    version_id: str = ""
