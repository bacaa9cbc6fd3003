"""Ranges and conditions of a request on an object that exists (RFC 9110, and what S3 makes of it)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from quire_gateway.core.s3_errors import S3Error

_RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


def read_range(header: str, size: int) -> tuple[int, int] | None:
    """Start and end (exclusive) within `size` bytes; None for all of them: no range, or one that S3 passes over.

    Raises `S3Error` InvalidRange for one that holds no byte.
    """
    matched = _RANGE.fullmatch(header.replace(" ", ""))
    if matched is None or not any(matched.groups()):
        return None
    first, last = matched.groups()
    if not first:
        start, end = max(0, size - int(last)), size
        empty = int(last) == 0 or size == 0
    else:
        if last and int(last) < int(first):
            return None
        start, end = int(first), min(size, int(last) + 1 if last else size)
        empty = start >= size
    if empty:
        raise S3Error("InvalidRange", "The requested range is not satisfiable", {"Content-Range": f"bytes */{size}"})
    return start, end


def read_copy_range(header: str, size: int) -> tuple[int, int]:
    """Start and end (exclusive) of what UploadPartCopy takes. Raises `S3Error` where it is not within the source."""
    matched = _RANGE.fullmatch(header)
    if matched is None or not all(matched.groups()):
        raise S3Error("InvalidArgument", "The x-amz-copy-source-range value must be of the form bytes=first-last")
    first, last = map(int, matched.groups())
    if not first <= last < size:
        raise S3Error("InvalidArgument", f"Range specified is not valid for source object of size: {size}")
    return first, last + 1


@dataclass(frozen=True, slots=True)
class Conditions:
    """As they came; "" for none."""

    if_match: str = ""
    if_none_match: str = ""
    if_modified_since: str = ""
    if_unmodified_since: str = ""

    def check_read(self, etag: str, modified_s: float) -> None:
        """`etag` without quotes. Raises `S3Error` NotModified or PreconditionFailed."""
        if self.if_match:
            if not matches(self.if_match, etag):
                raise S3Error("PreconditionFailed", "If-Match: the object has another ETag")
        elif int(modified_s) > _seconds(self.if_unmodified_since, float("inf")):
            raise S3Error("PreconditionFailed", "If-Unmodified-Since: the object was modified")
        if self.if_none_match:
            if matches(self.if_none_match, etag):
                raise S3Error("NotModified", "If-None-Match", {"ETag": f'"{etag}"'})
        elif int(modified_s) <= _seconds(self.if_modified_since, float("-inf")):
            raise S3Error("NotModified", "If-Modified-Since", {"ETag": f'"{etag}"'})

    def check_write(self, etag: str | None) -> None:
        """`etag` of what is there now. Raises `S3Error`: PreconditionFailed, NoSuchKey for If-Match on nothing."""
        if self.if_none_match and etag is not None and matches(self.if_none_match, etag):
            raise S3Error("PreconditionFailed", "If-None-Match: the object exists, or has this ETag")
        if self.if_match:
            if etag is None:
                raise S3Error("NoSuchKey", "If-Match: there is no such object")
            if not matches(self.if_match, etag):
                raise S3Error("PreconditionFailed", "If-Match: the object has another ETag")

    @property
    def of_write(self) -> bool:
        return bool(self.if_match or self.if_none_match)


def matches(header: str, etag: str) -> bool:
    """Strong comparison with any of the tags in `header`."""
    tags = [tag.strip() for tag in header.split(",")]
    return "*" in tags or any(tag.strip('"') == etag for tag in tags if not tag.startswith("W/"))


def _seconds(date: str, otherwise: float) -> float:
    """`otherwise` for none, and for what is no date: such a condition is passed over."""
    try:
        return parsedate_to_datetime(date).timestamp() if date else otherwise
    except (TypeError, ValueError, OverflowError):
        return otherwise
