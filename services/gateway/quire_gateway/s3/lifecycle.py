"""Lifecycle rules of a bucket, which end versions and uploads (S3's BucketLifecycleConfiguration).

As AWS has it, an age of some days ends at the first midnight (UTC) after them.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from quire.model.buckets import DeleteOutcome, MultipartUpload, StoredObject
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3 import xml
from quire_gateway.s3.backend import ObjectBackend

SETTING: Final = "lifecycle"
_RULES_MAX: Final = 1000
_ID_MAX: Final = 255
_DAY_S: Final = 86_400
_PAGE: Final = 1000
_TAG: Final = {"Key": None, "Value": None}
_SIZES: Final = {"ObjectSizeGreaterThan": None, "ObjectSizeLessThan": None}
_SCHEMA: Final = {
    "Rule": {
        "ID": None,
        "Prefix": None,
        "Status": None,
        "Filter": {"Prefix": None, "Tag": _TAG, **_SIZES, "And": {"Prefix": None, "Tag": _TAG, **_SIZES}},
        "Expiration": {"Days": None, "Date": None, "ExpiredObjectDeleteMarker": None},
        "NoncurrentVersionExpiration": {"NoncurrentDays": None, "NewerNoncurrentVersions": None},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": None},
    }
}
Tree = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class LifecycleRule:
    """A rule. Days are 0 where it has none.

    Attributes:
        enabled: Whether it is applied.
        prefix: Of the keys that it is about.
        tags: That an object must have.
        larger: Bytes that it must exceed.
        smaller: Bytes that it must stay below.
        days: Age at which an object expires.
        date_s: Time from which on objects expire, Unix epoch; 0 for none.
        lone_markers: Whether delete markers go that hide nothing any has_more.
        older_days: Days after which a version goes that another one has replaced.
        older_kept: How many of those stay in any case.
        upload_days: Age at which unfinished uploads are aborted.
    """

    enabled: bool
    prefix: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    larger: int = -1
    smaller: int | None = None
    days: int = 0
    date_s: float = 0.0
    lone_markers: bool = False
    older_days: int = 0
    older_kept: int = 0
    upload_days: int = 0

    def _is_about(self, version: StoredObject) -> bool:
        size_fits = version.size > self.larger and (self.smaller is None or version.size < self.smaller)
        tags_fit = all(version.tags.get(key) == value for key, value in self.tags.items())
        return self.enabled and version.key.startswith(self.prefix) and size_fits and tags_fit

    def ends(self, version: StoredObject, now_s: float) -> bool:
        """Whether a current version has expired."""
        is_old = bool(self.days) and _midnight_s(version.modified_s, self.days) <= now_s
        return self._is_about(version) and (is_old or 0 < self.date_s <= now_s)

    def ends_marker(self, marker: StoredObject) -> bool:
        """Whether a delete marker expires that is the only version of its object."""
        return self.enabled and self.lone_markers and marker.key.startswith(self.prefix)

    def ends_older(self, version: StoredObject, replaced_s: float, newer: int, now_s: float) -> bool:
        """Whether an older version expires. `replaced_s`: its replacement; `newer`: number of newer older ones."""
        is_due = bool(self.older_days) and _midnight_s(replaced_s, self.older_days) <= now_s
        return is_due and newer >= self.older_kept and self._is_about(version)

    def ends_upload(self, upload: MultipartUpload, now_s: float) -> bool:
        """Whether an unfinished upload is aborted."""
        is_due = bool(self.upload_days) and _midnight_s(upload.started_s, self.upload_days) <= now_s
        return self.enabled and is_due and upload.key.startswith(self.prefix)


def read_lifecycle(body: bytes) -> tuple[list[LifecycleRule], bytes]:
    """Return a LifecycleConfiguration's rules, and the document to keep, in which every rule has an ID.

    Raises:
        S3Error: MalformedXML, InvalidArgument; NotImplemented for transitions: there is one storage class.
    """
    tree = xml.read_tree(body, "LifecycleConfiguration", _SCHEMA)
    rules = xml.trees(tree, "Rule")
    if not 0 < len(rules) <= _RULES_MAX:
        raise S3Error("MalformedXML", f"{len(rules)} rules; 1 to {_RULES_MAX}")
    for rule in rules:
        if not any(xml.texts(rule, "ID")):
            rule[:] = [("ID", secrets.token_hex(12)), *(child for child in rule if child[0] != "ID")]
    ids = [_text(rule, "ID") for rule in rules]
    if len(set(ids)) < len(ids) or any(len(name) > _ID_MAX for name in ids):
        raise S3Error("InvalidArgument", f"IDs of rules are unique, and have {_ID_MAX} characters at most")
    return [_rule(rule) for rule in rules], xml.document("LifecycleConfiguration", tree)


def _rule(rule: Tree) -> LifecycleRule:
    status = _text(rule, "Status").strip()
    if status not in ("Enabled", "Disabled"):
        raise S3Error("MalformedXML", "A rule's Status is Enabled or Disabled")
    filters, prefixes = xml.trees(rule, "Filter"), xml.texts(rule, "Prefix")
    if len(filters) + len(prefixes) != 1:
        raise S3Error("MalformedXML", "A rule has one Filter, or a Prefix")
    chosen = filters[0] if filters else [("Prefix", prefixes[0])]
    if len(chosen) > 1:
        raise S3Error("MalformedXML", "A Filter has one element; several are within And")
    chosen = (xml.trees(chosen, "And") or [chosen])[0]
    if xml.trees(filters[0] if filters else [], "And") and len(chosen) < 2:
        raise S3Error("MalformedXML", "And has two elements or more")
    pairs = [(xml.texts(tag, "Key"), xml.texts(tag, "Value")) for tag in xml.trees(chosen, "Tag")]
    if any(len(keys) != 1 or len(values) != 1 for keys, values in pairs):
        raise S3Error("MalformedXML", "A Tag has one Key and one Value")
    larger, smaller = (_number(chosen, f"ObjectSize{name}", 0) for name in ("GreaterThan", "LessThan"))
    expirations, noncurrent, aborts = (
        xml.trees(rule, name)
        for name in ("Expiration", "NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload")
    )
    if not (expirations or noncurrent or aborts) or max(map(len, (expirations, noncurrent, aborts))) > 1:
        raise S3Error("MalformedXML", "A rule has an action, and each of them once")
    expiration, older, abort = ((values or [[]])[0] for values in (expirations, noncurrent, aborts))
    if expirations and len(expiration) != 1:
        raise S3Error("MalformedXML", "An Expiration has one of Days, Date and ExpiredObjectDeleteMarker")
    lone_markers = [text.strip() for text in xml.texts(expiration, "ExpiredObjectDeleteMarker")] == ["true"]
    if (aborts or lone_markers) and (pairs or larger is not None or smaller is not None):
        raise S3Error("InvalidRequest", "Uploads and delete markers have neither tags nor sizes to filter by")
    return LifecycleRule(
        enabled=status == "Enabled",
        prefix=_text(chosen, "Prefix"),
        tags={keys[0]: values[0] for keys, values in pairs},
        larger=larger if larger is not None else -1,
        smaller=smaller,
        days=_number(expiration, "Days", 1) or 0,
        date_s=_date_s(expiration),
        lone_markers=lone_markers,
        older_days=(_number(older, "NoncurrentDays", 1) or 0) if not noncurrent else _required_days(older),
        older_kept=_number(older, "NewerNoncurrentVersions", 1) or 0,
        upload_days=_number(abort, "DaysAfterInitiation", 1) or 0,
    )


def _text(tree: Tree, name: str) -> str:
    values = xml.texts(tree, name)
    if len(values) > 1:
        raise S3Error("MalformedXML", f"{name} is there {len(values)} times")
    return values[0] if values else ""


def _required_days(older: Tree) -> int:
    days = _number(older, "NoncurrentDays", 1)
    if days is None:
        raise S3Error("MalformedXML", "A NoncurrentVersionExpiration has NoncurrentDays")
    return days


def _number(tree: Tree, name: str, low: int) -> int | None:
    values = [text.strip() for text in xml.texts(tree, name)]
    if not values:
        return None
    if len(values) > 1 or not re.fullmatch("[0-9]{1,15}", values[0]) or int(values[0]) < low:
        raise S3Error("InvalidArgument", f"{name} is a number from {low} on")
    return int(values[0])


def _date_s(expiration: Tree) -> float:
    values = [text.strip() for text in xml.texts(expiration, "Date")]
    if not values:
        return 0.0
    try:
        date = datetime.fromisoformat(values[0])
    except ValueError:
        raise S3Error("MalformedXML", "Date is a date of ISO 8601") from None
    date_s = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if date_s % _DAY_S or date_s <= 0:
        raise S3Error("InvalidArgument", "'Date' must be at midnight GMT")
    return date_s


def _midnight_s(since_s: float, days: int) -> float:
    return math.ceil((since_s + days * _DAY_S) / _DAY_S) * _DAY_S


async def apply(backend: ObjectBackend, rules: Sequence[LifecycleRule], now_s: float) -> int:
    """Delete a bucket's expired versions and uploads, unless they are replaced; returns their number."""
    count = 0
    async for group in _by_key(backend):
        for version, is_current in _expired(group, rules, now_s):
            with contextlib.suppress(S3Error):  # it is another one by now
                deletion = await backend.delete_unchanged(version, for_good=not is_current, older=not is_current)
                count += deletion.outcome is DeleteOutcome.DELETED
    if any(rule.upload_days for rule in rules):
        for upload in await backend.uploads():
            if any(rule.ends_upload(upload, now_s) for rule in rules):
                with contextlib.suppress(S3Error):
                    await backend.abort(upload.key, upload.upload_id)
                    count += 1
    return count


def _expired(
    versions: Sequence[StoredObject], rules: Sequence[LifecycleRule], now_s: float
) -> list[tuple[StoredObject, bool]]:
    """Return the expired versions of an object, given the newest first; and whether each is the current one."""
    newest, expired = versions[0], list[tuple[StoredObject, bool]]()
    if newest.is_marker:
        if len(versions) == 1 and any(rule.ends_marker(newest) for rule in rules):
            expired.append((newest, False))
    elif any(rule.ends(newest, now_s) for rule in rules):
        expired.append((newest, True))
    for at, version in enumerate(versions[1:]):
        if any(rule.ends_older(version, versions[at].modified_s, at, now_s) for rule in rules):
            expired.append((version, False))
    return expired


async def _by_key(backend: ObjectBackend) -> AsyncIterator[list[StoredObject]]:
    """Yield all versions of one object after the other, the newest first."""
    group: list[StoredObject] = []
    marker, version_id, has_more = "", "", True
    while has_more:
        page = await backend.versions("", marker, version_id, False, _PAGE)
        has_more = page.truncated and bool(page.versions)
        for version in page.versions:
            if group and group[0].key != version.key:
                yield group
                group = []
            group.append(version)
        if page.versions:
            marker, version_id = page.versions[-1].key, page.versions[-1].version_id or "null"
    if group:
        yield group
