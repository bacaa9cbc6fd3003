"""Listings with prefix and delimiter: keys, and what groups of keys begin with, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from quire.model.buckets import NULL_VERSION, StoredObject
from quire_gateway.s3.backend import Backend, ObjectBackend

_AFTER_JUMP: Final = 32  # the next entry is often a common prefix too: most of a full page would be thrown away


@dataclass(slots=True)
class ObjectListing:
    """A page of entries: objects and common prefixes together. `last`: of them; "" at the end."""

    objects: list[StoredObject] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    last: str = ""
    truncated: bool = False


@dataclass(slots=True)
class VersionListing:
    """A page of versions and common prefixes together. `versions`: each with whether it is the newest of its key.

    `last`, `last_version`: key and version of the last entry, or a common prefix and "".
    """

    versions: list[tuple[StoredObject, bool]] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    last: str = ""
    last_version: str = ""
    truncated: bool = False


async def list_versions(
    backend: Backend, prefix: str, delimiter: str, marker: tuple[str, str], limit: int
) -> VersionListing:
    """List from after `marker`: a key and "" or one of its versions. If the key is a common prefix, from after all."""
    key_marker, version_id = marker
    if not isinstance(backend, ObjectBackend):
        plain = await list_objects(backend, prefix, delimiter, key_marker, limit)
        versions = [(entry, True) for entry in plain.objects]
        return VersionListing(versions, plain.prefixes, plain.last, NULL_VERSION, plain.truncated)
    listing = VersionListing()
    past = _is_common(key_marker, prefix, delimiter) and not version_id
    has_more, page_size = limit > 0, limit + 1
    while has_more:
        page = await backend.versions(prefix, key_marker, version_id, past, page_size)
        page_size = limit + 1
        has_more = page.truncated and bool(page.versions)
        for version, is_latest in zip(page.versions, page.latest, strict=True):
            if len(listing.versions) + len(listing.prefixes) == limit:
                listing.truncated = True
                return listing
            cut = version.key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                key_marker, version_id, past, has_more = version.key[: cut + len(delimiter)], "", True, True
                listing.prefixes.append(key_marker)
                listing.last, listing.last_version = key_marker, ""
                page_size = min(limit + 1, _AFTER_JUMP)
                break
            listing.versions.append((version, is_latest))
            key_marker, version_id, past = version.key, version.version_id or NULL_VERSION, False
            listing.last, listing.last_version = key_marker, version_id
    return listing


def _is_common(marker: str, prefix: str, delimiter: str) -> bool:
    return bool(delimiter) and marker.startswith(prefix) and marker.endswith(delimiter) and len(marker) > len(prefix)


async def list_objects(backend: Backend, prefix: str, delimiter: str, marker: str, limit: int) -> ObjectListing:
    """List from after `marker`; if that is a common prefix, from after all keys that begin with it."""
    listing = ObjectListing()
    if not limit:
        return listing
    past = _is_common(marker, prefix, delimiter)
    page_size = limit + 1
    while True:
        page = await backend.page(prefix, marker, past, page_size, delimiter)
        jumped = False
        entries: list[tuple[str, StoredObject | None]] = [(entry.key, entry) for entry in page.objects]
        if page.common:
            entries.append((page.common, None))
        for key, entry in entries:
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if len(listing.objects) + len(listing.prefixes) == limit:
                listing.truncated = True
                return listing
            if entry is not None and cut < 0:
                listing.objects.append(entry)
                listing.last = marker = key
                past = False
                continue
            common = key[: cut + len(delimiter)]
            listing.prefixes.append(common)
            listing.last = marker = common
            past = jumped = True
            break
        if not jumped:
            if not page.more:
                return listing
            if page.pause:
                listing.last, listing.truncated = page.last, True
                return listing
            marker, past = page.last, False
        page_size = min(limit + 1, _AFTER_JUMP) if jumped else limit + 1
