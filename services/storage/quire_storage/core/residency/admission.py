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
    assert len(event.offsets) == len(keys), "each has a slot"
    if len(set(keys)) < len(keys):
        raise KeysInvalid("a key appears twice", field="chunk_keys")
    stored = {key: entry for key in keys if (entry := copies.find(key)) is not None}
    if event.on_existing is OnExisting.VERIFY:
        _verify(copies, event, stored)
    fresh = [at for at, key in enumerate(keys) if key not in stored] if stored else range(len(keys))
    stride = copies.ledger.slots.layer_stride(event.chunks[0].shape)
    entries = dict(stored)
    for at in fresh:
        entry = entries[keys[at]] = copies.add(event.chunks[at], event.level, Phase.ARRIVING)
        entry.recorded = event.within.get(entry.key, event.generation) if event.within else event.generation
        entry.memory = MemoryPlace(event.offsets[at], stride)
        copies.note_arrival(entry)
    memory.give(event.transfer, [entries[keys[at]] for at in fresh])
    return [entries[key] for key in keys]


def _verify(copies: Copies, event: ev.StoreOffered, stored: dict[bytes, Entry]) -> None:
    """Compare the offered chunks with the stored ones, on this node or elsewhere. Raises `ContentConflict`."""
    present = {chunk.key: chunk for chunk in event.elsewhere} | {key: entry.chunk for key, entry in stored.items()}
    conflicts = [chunk for chunk in event.chunks if chunk.key in present and not present[chunk.key].same_content(chunk)]
    if conflicts:
        for entry in stored.values():
            copies.rest(entry)
        raise ContentConflict(f"key {conflicts[0].key.hex()} holds other bytes; they were kept", field="chunk_keys")
