"""Copies in the object tier: which are wanted there, and which were written."""

from __future__ import annotations

from quire_storage.core.residency import events as ev
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.writes import Writes


class Uploads:
    """Requests uploads of listed copies, and records them. Without an object tier it does nothing."""

    def __init__(self, copies: Copies, writes: Writes) -> None:
        self._copies = copies
        self._writes = writes

    def start(self, entry: Entry) -> None:
        """Ask for the upload of a copy, if it is listed and the object tier lacks it."""
        is_wanted = entry.phase is Phase.RESIDENT and entry.generation != 0 and not entry.in_object
        if self._copies.objects and is_wanted:
            self._copies.out.append(ev.Upload(entry.key, entry.chunk.slot_bytes, entry.written))

    def uploaded(self, event: ev.Uploaded) -> None:
        """Record that the object tier has a chunk. The header records it, too, once it is written."""
        entry = self._copies.find_resident(event.chunk.key)
        if entry is None:
            return
        if entry.chunk.same_content(event.chunk):
            if entry.generation == event.generation:
                entry.in_object = True
            if not entry.written:
                entry.written = True
                if entry.disk is not None and not entry.write:
                    self._writes.write_headers([entry])
        self._copies.rest(entry)
