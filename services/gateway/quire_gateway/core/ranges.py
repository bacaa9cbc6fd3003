"""Ranges and conditions of a request on an S3 object (RFC 9110), and the errors that S3 answers with."""

from __future__ import annotations

import re
from typing import Final

from quire.model.buckets import ObjectPart, StoredObject
from quire_gateway.core.byte_ranges import NothingInRange, byte_range
from quire_gateway.core.preconditions import ConditionOutcome, Preconditions
from quire_gateway.core.s3_errors import S3Error

_COPY_RANGE: Final = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")


def read_range(header: str, size: int) -> tuple[int, int] | None:
    """Start and end (exclusive) within `size` bytes; None for all of them: no range, or one that S3 passes over.

    Raises `S3Error` InvalidRange for one that holds no byte.
    """
    try:
        return byte_range(header, size)
    except NothingInRange:
        headers = {"Content-Range": f"bytes */{size}"}
        details = {"RangeRequested": header, "ActualObjectSize": str(size)}
        raise S3Error("InvalidRange", "The requested range is not satisfiable", headers, details) from None


def read_part(number: int, header: str, entry: StoredObject) -> tuple[int, int]:
    """Start and end (exclusive) of the part that `partNumber` means; a part may have no bytes.

    An object that was not uploaded in parts is its own first one.

    Raises:
        S3Error: InvalidPartNumber for another part, InvalidRequest for a range besides.
    """
    if header:
        raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
    start = 0
    for part in entry.parts or (ObjectPart(1, entry.size),):
        if part.number == number:
            return start, start + part.size
        start += part.size
    raise S3Error("InvalidPartNumber", f"Part {number} is not satisfiable: the object has no such part")


def read_copy_range(header: str, size: int) -> tuple[int, int]:
    """Start and end (exclusive) of what UploadPartCopy takes. Raises `S3Error` where it is not within the source."""
    matched = _COPY_RANGE.fullmatch(header)
    if matched is None:
        raise S3Error("InvalidArgument", "The x-amz-copy-source-range value must be of the form bytes=first-last")
    first, last = map(int, matched.groups())
    if not first <= last < size:
        raise S3Error("InvalidArgument", f"Range specified is not valid for source object of size: {size}")
    return first, last + 1


def check_read(conditions: Preconditions, etag: str, modified_s: float) -> None:
    """`etag` without quotes. Raises `S3Error` NotModified or PreconditionFailed."""
    verdict = conditions.of_read(f'"{etag}"', modified_s)
    if verdict is ConditionOutcome.FAILED:
        raise S3Error("PreconditionFailed", "At least one of the preconditions did not hold: the object is another one")
    if verdict is ConditionOutcome.NOT_MODIFIED:
        raise S3Error("NotModified", "Not modified", {"ETag": f'"{etag}"'})


def check_write(conditions: Preconditions, etag: str | None) -> None:
    """Check against the current `etag`.

    Raises `S3Error`: PreconditionFailed, NoSuchKey for If-Match without an object.
    """
    if conditions.if_match and etag is None:
        raise S3Error("NoSuchKey", "If-Match: there is no such object")
    if not conditions.allows_write(f'"{etag}"' if etag is not None else None):
        raise S3Error("PreconditionFailed", "If-Match or If-None-Match does not hold for the object that is there")
