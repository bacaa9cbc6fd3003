"""The entry of a store: copies for all of its chunks, or none."""

from __future__ import annotations

from quire.model.durability import OnExisting
from quire.model.errors import ContentConflict, KeysInvalid
from quire_storage.core.chunks import MemoryPlace
from quire_storage.core.residency import events as ev
from quire_storage.core.residency.copies import Copies
from quire_storage.core.residency.entry import Entry, Phase
from quire_storage.core.residency.memory import SlotReservations


def enter(copies: Copies, memory: SlotReservations, event: ev.StoreOffered) -> list[Entry]:
    """Add a copy for each chunk that is not here; it takes over its slot of the transfer.

    Returns:
        The copies of all chunks, new or not.

    Raises:
        KeysInvalid: A key appears twice.
        ContentConflict: A key holds other bytes, and the store verifies.
    """
    keys = [chunk.key for chunk in event.chunks]
    if len(set(keys)) < len(keys):
        raise KeysInvalid("a key appears twice", field="chunk_keys")
    stored = {key: entry for key in keys if (entry := copies.find(key)) is not None}
    present = {chunk.key: chunk for chunk in event.elsewhere} | {key: entry.chunk for key, entry in stored.items()}
    conflicts = [chunk for chunk in event.chunks if chunk.key in present and not present[chunk.key].same_content(chunk)]
    if conflicts and event.on_existing is OnExisting.VERIFY:
        for entry in stored.values():
            copies.rest(entry)
        raise ContentConflict(f"key {conflicts[0].key.hex()} holds other bytes; they were kept", field="chunk_keys")
    stride = copies.ledger.slots.layer_stride(event.chunks[0].shape)
    entries = []
    for chunk, offset in zip(event.chunks, event.offsets, strict=True):
        entry = stored.get(chunk.key)
        if entry is None:
            entry = copies.add(chunk, event.level, Phase.ARRIVING)
            entry.recorded = event.within.get(chunk.key, event.generation)
            copies.note_arrival(entry)
            memory.give(offset, event.transfer, entry)
            entry.memory = MemoryPlace(offset, stride)
        entries.append(entry)
    return entries
