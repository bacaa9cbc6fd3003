"""What the clients of a tiny cluster do, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.model.durability import Durability, OnExisting
from quire.model.index import OBJECT_TIER, Pin
from quire.model.keys import ChunkKeys
from quire.model.records import ChunkRecord
from quire_orchestrator.core.eviction import drops
from quire_storage.core.chunks import Chunk, Copy
from quire_storage.core.residency import events as ev
from tests.simulation.exhaustive.model import (
    KEYS,
    LEASE,
    RECORDS,
    SHAPE,
    Broken,
    Node,
    Step,
    chunk_of,
    content_of,
    names_of,
    now,
)
from tests.simulation.exhaustive.state import State

_STRENGTH: Final = {level: rank for rank, level in enumerate(Durability)}


class Clients(State):
    """Stores, reads and evictions."""

    def ingest(self, node: Node, number: int) -> None:
        store = self.operation(number)
        transfer = self.ticket()
        offsets = self.ask(node, transfer, ev.Reserved(transfer, SHAPE, store.count))
        if isinstance(offsets, list):
            node.arriving[transfer] = (tuple(offsets), store.version, False)
            self.later("pulled", node, number, transfer, tuple(offsets))
        else:
            self.post(node, ev.ReservationEnded(transfer))
            self.end(number)

    def pulled(self, node: Node, number: int, transfer: int, offsets: tuple[int, ...]) -> None:
        store, ticket = self.operation(number), self.ticket()
        chunks = [chunk_of(at, store.version) for at in range(store.count)]
        for chunk, offset in zip(chunks, offsets, strict=True):
            node.memory[offset] = content_of(chunk)
        node.arriving[transfer] = (offsets, store.version, True)
        self.later("wait", node, number, transfer, ticket)
        offer = ev.StoreOffered(
            ticket=ticket,
            transfer=transfer,
            chunks=chunks,
            offsets=list(offsets),
            level=store.level,
            on_existing=OnExisting.SKIP,
            generation=self.index.draw(),
        )
        self.post(node, offer)

    def acknowledge(self, node: Node, number: int, transfer: int, ticket: int, indexed: Any) -> None:
        residency, store = node.residency, self.operation(number)
        assert residency is not None
        if isinstance(indexed, frozenset):
            for key in residency.acknowledged(ticket) & indexed:
                found = residency.look(key)
                if found is None:
                    raise Broken(f"{names_of([key])} is acknowledged, and cannot be read at that moment")
                _, generation = found
                if store.level is Durability.OBJECT and not residency.in_object(key):
                    continue
                # An entry that has ended since was evicted beside the store: its eviction was asked for.
                entry = self.index.state.entries.get(key)
                if self.damaged or (entry is not None and entry.generation == generation):
                    self.promise(key, generation, store.level)
        self.post(node, ev.Unpinned(ticket))
        del node.arriving[transfer]
        self.post(node, ev.ReservationEnded(transfer))
        self.end(number)

    def follow(self, node: Node, number: int) -> None:
        """Join the stores that run, for what cannot be read."""
        ticket = self.ticket()
        copies, missing = self.ask(node, ticket, ev.Pinned(ticket, KEYS, True))
        joined: list[tuple[int, int, int]] = []
        for transfer, (offsets, version, _) in node.arriving.items():
            wanted = [at for at in range(len(offsets)) if KEYS[at] in missing]
            asked = self.ticket()
            event = ev.Followed(asked, ticket, transfer, [KEYS[at] for at in wanted], [offsets[at] for at in wanted])
            for place in self.ask(node, asked, event):
                at = wanted[place]
                joined.append((transfer, offsets[at], content_of(chunk_of(at, version))))
        self.later("followed", node, number, ticket, tuple(copies), tuple(joined))

    def followed(
        self, node: Node, number: int, ticket: int, copies: tuple[Copy, ...], joined: tuple[tuple[int, int, int], ...]
    ) -> None:
        for _, offset, content in joined:
            if node.memory.get(offset) != content:
                raise Broken(f"a follower was sent the bytes of {node.memory.get(offset)}, not of {content}")
        self.read(node, number, ticket, (copies, ()))

    def promise(self, key: bytes, generation: int, level: Durability) -> None:
        before = self.promises.get(key)
        if before is None or before[0] != generation or _STRENGTH[before[1]] < _STRENGTH[level]:
            self.promises[key] = (generation, level)

    def look_up(self, number: int, node: int) -> None:
        if self.nodes[node].residency is None:
            self.end(number)
            return
        lease = LEASE + bytes([number])
        pin = Pin(lease_id=lease, expires_ms=1_000, ttl_ms=1_000, now_ms=0)
        match = now(self.index.match(ChunkKeys(b"".join(KEYS)), pin))
        if not match.count:
            self.end(number)
            return
        tip = KEYS[match.count - 1]
        self.later("deliver", self.nodes[node], number, match.count, tip)

    def deliver(self, node: Node, number: int, count: int, tip: bytes) -> None:
        ticket = self.ticket()
        copies, missing = self.ask(node, ticket, ev.Pinned(ticket, KEYS[:count], True))
        if missing and node.residency is not None and node.residency.copies.objects:
            self.later("load", node, number, ticket, tuple(copies), tuple(missing))
        else:
            self.later("read", node, number, ticket, (copies, missing))

    def load(self, node: Node, number: int, ticket: int, copies: tuple[Copy, ...], missing: tuple[bytes, ...]) -> None:
        """Begin to read what the object tier has; it goes into slots if there are any."""
        chunks = tuple(chunk for key in missing if (chunk := self.newest_object(key)) is not None)
        transfer = self.ticket()
        reserved = ev.Reserved(transfer, SHAPE, len(chunks), patient=False)
        offsets = tuple(self.ask(node, transfer, reserved) or ()) if chunks else ()
        for chunk, offset in zip(chunks, offsets, strict=False):
            node.memory[offset] = content_of(chunk)
        entries = {chunk.key: self.index.state.entries.get(chunk.key) for chunk in chunks}
        within = {key: entry.generation for key, entry in entries.items() if entry and OBJECT_TIER in entry.nodes}
        self.later("loaded", node, number, ticket, copies, missing, transfer, offsets, chunks, within)

    def loaded(
        self,
        node: Node,
        number: int,
        ticket: int,
        copies: tuple[Copy, ...],
        missing: tuple[bytes, ...],
        transfer: int,
        offsets: tuple[int, ...],
        chunks: tuple[Chunk, ...],
        within: Mapping[bytes, int],
    ) -> None:
        """Keep the chunks that were read, and have the index list them, as a prefetch does."""
        for chunk, offset in zip(chunks, offsets, strict=False):
            if node.memory[offset] != content_of(chunk):
                raise Broken(f"another wrote into the slot of {names_of([chunk.key])}")
            self.post(node, ev.Loaded(chunk, transfer, offset))
        self.post(node, ev.ReservationEnded(transfer))
        if within := {chunk.key: within[chunk.key] for chunk in chunks[: len(offsets)] if chunk.key in within}:
            listing = self.ticket()
            self.later("wait to reregister", node, listing)
            self.post(node, ev.RegistrationWanted(listing, list(within), within=within, in_object=True))
        delivered = {chunk.key for chunk in chunks}
        self.read(node, number, ticket, (copies, [key for key in missing if key not in delivered]))

    def newest_object(self, key: bytes) -> Chunk | None:
        mine = [chunk for (each, _), chunk in self.objects.items() if each == key]
        return mine[-1] if mine else None

    def read(self, node: Node, number: int, ticket: int, value: Any) -> None:
        copies, missing = value
        for copy in copies:
            got = self.read_from(node, copy)
            if got != content_of(copy.chunk):
                raise Broken(f"{names_of([copy.chunk.key])} was delivered with the bytes of {got}")
        assert node.residency is not None
        denied = [record for record in RECORDS if record.key in missing]
        self.post(node, ev.Denied(denied))
        self.post(node, ev.Unpinned(ticket))
        self.let_go(number)
        self.end(number)

    def evict(self, number: int, keep: int) -> None:
        self.evict_now(tuple(reversed(RECORDS[keep:])), "")
        self.end(number)

    def evict_now(self, records: tuple[ChunkRecord, ...], asking: str) -> Any:
        evicted = now(self.index.evict(records, 0, 1, asking=asking))
        for gone in evicted.removed:
            if self.promises.get(gone.record.key, (0,))[0] == gone.generation:
                del self.promises[gone.record.key]
        for name, orders in drops(evicted, asking).items():
            self.steps.append(Step("drop", 0, 0, (name, tuple(orders))))
        return evicted
