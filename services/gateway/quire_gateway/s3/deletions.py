"""Deletions of objects and versions, and their conditions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from quire.model.buckets import NULL_VERSION, DeleteOutcome, Deletion, StoredObject
from quire_gateway.core.preconditions import Preconditions
from quire_gateway.core.ranges import check_write
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3.backend import Backend, ObjectBackend

_DIGITS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class DeleteConditions:
    """Conditions of a deletion on the object, as the client writes them; "" for none."""

    etag: str = ""
    modified: str = ""
    size: str = ""

    def __bool__(self) -> bool:
        return bool(self.etag or self.modified or self.size)

    def check(self, entry: StoredObject) -> None:
        """Check an object. Raises `S3Error` PreconditionFailed, InvalidArgument."""
        if entry.is_marker:
            raise S3Error("PreconditionFailed", "The object is deleted: its newest version is a delete marker")
        if self.etag:
            check_write(Preconditions(if_match=self.etag), entry.etag)
        if self.size and not (self.size.isascii() and self.size.isdigit() and len(self.size) < _DIGITS_MAX):
            raise S3Error("InvalidArgument", "The size of a condition is a number of bytes")
        if (self.size and int(self.size) != entry.size) or (
            self.modified and int(_time(self.modified).timestamp()) != int(entry.modified_s)
        ):
            raise S3Error("PreconditionFailed", "The object has another size or time than the request says")


async def delete(backend: Backend, key: str, version_id: str, conditions: DeleteConditions) -> Deletion:
    """Delete an object, or a version for good. Raises `S3Error`."""
    if not isinstance(backend, ObjectBackend):
        if version_id not in ("", NULL_VERSION) or conditions.modified or conditions.size:
            raise S3Error("NotImplemented", "This bucket has neither versions nor such conditions")
        etag = conditions.etag
        if etag:
            entry = await backend.head(key)
            check_write(Preconditions(if_match=etag), entry.etag if entry is not None else None)
            etag = entry.etag if entry is not None else ""
        return await backend.delete(key, etag)
    if conditions:
        entry = await backend.version(key, version_id)
        if entry is None:  # as after a deletion whose answer was lost
            return Deletion(DeleteOutcome.MISSING)
        conditions.check(entry)
        return await backend.delete_unchanged(entry, for_good=bool(version_id))
    if version_id:
        deletion = await backend.delete_version(key, version_id)
    else:
        deletion = await backend.delete(key, "")
    if deletion.outcome is DeleteOutcome.MISSING:
        await backend.check_there()
    return deletion


def _time(text: str) -> datetime:
    """Parse a time of HTTP or of ISO 8601. Raises `S3Error` InvalidArgument."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            time = parse(text)
        except (ValueError, OverflowError):
            continue
        return time if time.tzinfo else time.replace(tzinfo=UTC)
    raise S3Error("InvalidArgument", f"{text[:40]} is no time")
