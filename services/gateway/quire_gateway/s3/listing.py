"""Listings with prefix and delimiter: keys, and what groups of keys begin with, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from quire.model.buckets import StoredObject
from quire_gateway.s3.backend import Backend

_AFTER_JUMP: Final = 32  # the next entry is often a common prefix too: most of a full page would be thrown away


@dataclass(slots=True)
class Listing:
    """Up to so many entries: objects and common prefixes together. `last`: of them; "" if there is no more."""

    objects: list[StoredObject] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    last: str = ""
    truncated: bool = False


async def list_objects(backend: Backend, prefix: str, delimiter: str, after: str, limit: int) -> Listing:
    """From after `after`, which may be a common prefix: then from after all keys that begin with it."""
    listing = Listing()
    if not limit:
        return listing
    past = bool(delimiter) and after.startswith(prefix) and after.endswith(delimiter) and len(after) > len(prefix)
    wanted = limit + 1
    while True:
        page = await backend.page(prefix, after, past, wanted, delimiter)
        jumped = False
        for key, entry in [
            *((each.key, each) for each in page.objects),
            *([(page.common, None)] if page.common else []),
        ]:
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if len(listing.objects) + len(listing.prefixes) == limit:
                listing.truncated = True
                return listing
            if entry is not None and cut < 0:
                listing.objects.append(entry)
                listing.last = after = key
                past = False
                continue
            common = key[: cut + len(delimiter)]
            listing.prefixes.append(common)
            listing.last = after = common
            past = jumped = True
            break
        if not jumped:
            if not page.more:
                return listing
            if page.pause:
                listing.last, listing.truncated = page.last, True
                return listing
            after, past = page.last, False
        wanted = min(limit + 1, _AFTER_JUMP) if jumped else limit + 1
