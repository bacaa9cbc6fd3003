"""What nodes, index and object tier do for each other, step by step: messages, requests, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping

from quire.model.fingerprints import fingerprint
from quire.model.index import OBJECT_TIER, Drop, Held, ObjectMark
from quire.model.records import ChunkRecord
from quire_storage.core.chunks import Chunk
from quire_storage.core.residency import events as ev
from tests.simulation.exhaustive.clients import Clients
from tests.simulation.exhaustive.model import LOST, RECORDS, Broken, Node, Step, content_of, names_of, now

_RECORD_OF = {fingerprint(record.key): record for record in RECORDS}


class Steps(Clients):
    """Each takes the node and what the step carries."""

    def register(
        self,
        node: Node,
        ticket: int,
        records: tuple[ChunkRecord, ...],
        fresh: int,
        within: tuple[int, ...],
        in_object: bool,
    ) -> None:
        if within:
            marks = now(self.index.join(node.name, records, within, only_in_object=in_object))
            generations = [generation if mark else 0 for generation, mark in zip(within, marks, strict=True)]
        else:
            generations = now(self.index.register(node.name, records, 0, fresh=fresh))
        found = {record.key: each for record, each in zip(records, generations, strict=True) if each}
        self.later("registered", node, ticket, found)

    def registered(self, node: Node, ticket: int, generations: Mapping[bytes, int] | None) -> None:
        if generations is not None:
            self.post(node, ev.Indexed(ticket, generations))
        self.post(node, ev.IndexingEnded(ticket, LOST if generations is None else None))

    def withdraw(self, node: Node, records: tuple[ChunkRecord, ...], hidden: bool) -> None:
        now(self.index.unregister(node.name, records, 0, hidden=hidden))
        self.later("withdrawn", node, tuple(record.key for record in records))

    def ask_to_evict(self, node: Node, question: int, records: tuple[ChunkRecord, ...]) -> None:
        evicted = self.evict_now(records, node.name)
        out = {gone.record.key for gone in evicted.removed} | set(evicted.absent)
        self.later("answered", node, question, frozenset(out))

    def ask_to_withdraw(self, node: Node, question: int, records: tuple[ChunkRecord, ...]) -> None:
        marks = now(self.index.unregister(node.name, records, 0, only_in_object=True))
        out = frozenset(record.key for record, mark in zip(records, marks, strict=True) if mark)
        self.later("answered", node, question, out)

    def drop(self, name: str, drops: tuple[Drop, ...]) -> None:
        node = next(node for node in self.nodes if node.name == name)
        if node.residency is not None:
            self.post(node, ev.Dropped(self.ticket(), {drop.key: drop.generation for drop in drops}))
            self.settle_drops(name, drops)

    def drop_unanswered(self, name: str, drops: tuple[Drop, ...]) -> None:
        """The node carries it out; that it has is lost, and the index goes on remembering the drop."""
        node = next(node for node in self.nodes if node.name == name)
        if node.residency is not None:
            self.post(node, ev.Dropped(self.ticket(), {drop.key: drop.generation for drop in drops}))

    def settle_drops(self, name: str, drops: tuple[Drop, ...]) -> None:
        now(self.index.settle_drops(name, drops))

    def upload(self, node: Node, key: bytes) -> None:
        residency = node.residency
        assert residency is not None
        node.unsent.pop(key, None)
        found = residency.look(key)
        if key not in node.sending and found is not None and residency.wants_object(key):
            node.sending.add(key)
            self.later("ask for object" if found[0].in_object else "expect object", node, found[0].chunk, found[1])

    def ask_for_object(self, node: Node, chunk: Chunk, generation: int) -> None:
        """An object was written before: look whether the chunk's entry lists it."""
        ((listed, names),) = now(self.index.entries([chunk.record]))
        self.later("object asked for", node, chunk, generation, listed if OBJECT_TIER in names else 0)

    def object_asked_for(self, node: Node, chunk: Chunk, generation: int, listed: int) -> None:
        if listed == generation:
            self.object_listed(node, chunk, generation, ObjectMark.LISTED)
        else:
            self.later("expect object", node, chunk, generation)

    def expect_object(self, node: Node, chunk: Chunk, generation: int) -> None:
        kept = now(self.index.expect_objects([chunk.record], 1))[0]
        self.later("object expected", node, chunk, generation, kept)

    def object_expected(self, node: Node, chunk: Chunk, generation: int, kept: bool) -> None:
        assert node.residency is not None
        found = node.residency.look(chunk.key)
        if kept and found is not None and found[1] == generation:
            self.read_and_put(node, chunk.key, generation)
        else:
            self.again(node, chunk.key)

    def read_and_put(self, node: Node, key: bytes, generation: int) -> None:
        ticket = self.ticket()
        copies, _ = self.ask(node, ticket, ev.Pinned(ticket, [key], False))
        if copies:
            if self.read_from(node, copies[0]) != content_of(copies[0].chunk):
                raise Broken(f"{names_of([key])} is uploaded with other bytes")
            self.later("put", node, copies[0].chunk, generation)
        else:
            node.sending.discard(key)
        self.post(node, ev.Unpinned(ticket))

    def put(self, node: Node, chunk: Chunk, generation: int) -> None:
        self.objects[chunk.key, generation] = chunk
        self.later("list object", node, chunk, generation)

    def again(self, node: Node, key: bytes) -> None:
        assert node.residency is not None
        node.sending.discard(key)
        if node.residency.wants_object(key):
            node.unsent[key] = None
            self.later("upload", node, key)

    def list_object(self, node: Node, chunk: Chunk, generation: int) -> None:
        mark = now(self.index.add_objects([chunk.record], [generation]))[0]
        self.later("object listed", node, chunk, generation, mark)

    def object_listed(self, node: Node, chunk: Chunk, generation: int, mark: ObjectMark) -> None:
        if mark is ObjectMark.LISTED:
            self.post(node, ev.Uploaded(chunk, generation))
        self.again(node, chunk.key)

    def write(self, node: Node, write: ev.Write) -> None:
        for placed, source in zip(write.placed, write.sources, strict=True):
            node.disk[placed.place.offset] = node.memory[source.offset]
        self.pool(node).commit(list(write.placed))
        self.sync(node)
        self.post(node, ev.Written(write.write))

    def headers_written(self, node: Node, write: ev.WriteHeaders) -> None:
        self.sync(node)
        self.post(node, ev.Written(write.write))

    def forgotten(self, node: Node, forget: ev.Forget) -> None:
        self.sync(node)
        self.post(node, ev.Forgotten(forget.removal))

    def sync(self, node: Node) -> None:
        """Headers are durable, with whatever else has changed on their pages: a crash keeps them."""
        node.image[:] = self.pool(node).image(0)

    def delete_objects(self, claimed: tuple[ChunkRecord, ...], until_ms: int) -> None:
        gone = {record.key for record in claimed}
        self.objects = {name: chunk for name, chunk in self.objects.items() if name[0] not in gone}
        self.steps.append(Step("objects deleted", 0, 0, (claimed, until_ms)))

    def objects_deleted(self, claimed: tuple[ChunkRecord, ...], until_ms: int) -> None:
        now(self.index.objects_deleted(claimed, until_ms))

    def rebuild(self) -> None:
        found = sorted({chunk.key: chunk.record for chunk in self.objects.values()}.values(), key=lambda each: each.key)
        now(self.index.register(OBJECT_TIER, found, 0))

    def take_drops(self, node: Node) -> None:
        """Carried out is what the index does not list for the node under another entry."""
        assert node.residency is not None
        drops, _ = now(self.index.drops(node.name, 0))
        records = [record for record in RECORDS if record.key in {drop.key for drop in drops}]
        entries = now(self.index.entries(records))
        listed = {
            record.key: generation
            for record, (generation, names) in zip(records, entries, strict=True)
            if node.name in names
        }
        self.post(node, ev.Listed(listed))
        orders = {drop.key: drop.generation for drop in drops if drop.key not in listed}
        self.post(node, ev.Dropped(self.ticket(), orders))
        self.settle_drops(node.name, tuple(drops))
        self.later("compare", node)

    def compare(self, node: Node) -> None:
        page, _ = now(self.index.holdings(node.name, 0))
        self.later("compared", node, tuple(page))

    def compared(self, node: Node, page: tuple[Held, ...]) -> None:
        residency = node.residency
        assert residency is not None
        gone, listed = [], set()
        for held in page:
            record = _RECORD_OF[held.fingerprint]
            found = residency.look(record.key)
            if found is None:
                gone.append(record)
            elif found[1] == held.generation:
                listed.add(record.key)
        self.post(node, ev.Denied(gone))
        missing = sorted(set(residency.keys()) - listed)
        ticket = self.ticket()
        self.later("wait to reregister", node, ticket)
        self.post(node, ev.RegistrationWanted(ticket, missing))

    def reregistered(self, node: Node, ticket: int) -> None:
        self.post(node, ev.Unpinned(ticket))
