"""Listings with prefix and delimiter: keys, and what groups of keys begin with, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from quire.model.buckets import StoredObject
from quire_gateway.s3.backend import Backend

_AFTER_JUMP: Final = 32  # the next entry is often a common prefix too: most of a full page would be thrown away


@dataclass(slots=True)
class ObjectListing:
    """A page of entries: objects and common prefixes together. `last`: of them; "" at the end."""

    objects: list[StoredObject] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    last: str = ""
    truncated: bool = False


async def list_objects(backend: Backend, prefix: str, delimiter: str, marker: str, limit: int) -> ObjectListing:
    """List from after `marker`; if that is a common prefix, from after all keys that begin with it."""
    listing = ObjectListing()
    if not limit:
        return listing
    past = bool(delimiter) and marker.startswith(prefix) and marker.endswith(delimiter) and len(marker) > len(prefix)
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
