"""The prefix index in memory: what `quire_server.redis.PrefixIndex` does in Redis, by the same contract suite."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from quire.model.fingerprints import fingerprint
from quire.model.index import (
    DIGEST_MODULUS,
    OBJECT_TIER,
    Drop,
    Evicted,
    Gone,
    Held,
    Listing,
    Match,
    ObjectMark,
    Pin,
    PlacedRun,
    listing_number,
)
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys, KeySample
from quire.model.records import ChunkRecord


@dataclass(slots=True)
class IndexEntry:
    """An indexed chunk. `children`: how many indexed chunks extend it."""

    record: ChunkRecord
    generation: int
    nodes: tuple[str, ...] = ()
    children: int = 0

    @property
    def is_hollow(self) -> bool:
        """Whether nothing holds or extends it: then it is removed."""
        return not self.nodes and not self.children


@dataclass(slots=True)
class IndexState:
    """Everything that the index knows: can be copied, emptied and rolled back, as Redis can be.

    `objects`: objects that no entry lists, by key: when to delete them, or, claimed, until when that runs. `hidden`:
    nodes that keep a copy which they cannot read, by key, and the generation of the entry that listed it.
    """

    entries: dict[bytes, IndexEntry] = field(default_factory=dict)
    pins: dict[bytes, dict[bytes, int]] = field(default_factory=dict)
    objects: dict[bytes, tuple[bool, int, bytes]] = field(default_factory=dict)
    dropped: dict[str, dict[bytes, Drop]] = field(default_factory=dict)
    hidden: dict[bytes, dict[str, int]] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    epoch: str = ""
    rebuild: str = ""
    rebuilt: str = ""
    ticks: int = 0

    def copy(self) -> IndexState:
        """A snapshot."""
        return IndexState(
            {key: replace(entry) for key, entry in self.entries.items()},
            {key: dict(pins) for key, pins in self.pins.items()},
            objects=dict(self.objects),
            dropped={name: dict(keys) for name, keys in self.dropped.items()},
            changes=dict(self.changes),
            epoch=self.epoch,
            rebuild=self.rebuild,
            rebuilt=self.rebuilt,
            ticks=self.ticks,
        )


class MemoryIndex:
    """Methods are those of `PrefixIndex`. `seed` decides the generations that are drawn."""

    def __init__(self, seed: int = 0) -> None:
        self.state = IndexState()
        self._random = random.Random(seed)

    # ---- look-ups

    async def match(self, keys: ChunkKeys | KeySample, pin: Pin | None = None) -> Match:
        chain, wanted_bucket = list(keys) if isinstance(keys, ChunkKeys) else [], None
        if isinstance(keys, KeySample):
            chain, wanted_bucket = self._chain_of(keys)
        entries = list(takewhile(lambda entry: entry is not None, map(self.state.entries.get, chain)))
        runs: list[PlacedRun] = []
        for entry in entries:
            assert entry is not None
            count = runs.pop().count if runs and runs[-1].nodes == entry.nodes else 0
            runs.append(PlacedRun(count + 1, entry.nodes))
        if wanted_bucket is not None:
            return Match(tuple(runs), wanted_bucket=wanted_bucket)
        last = entries[-1] if entries else None
        if last is not None and pin is not None:
            self._pin(last.record.key, pin)
        return Match(tuple(runs), last is not None and last.children > 0)

    def _chain_of(self, keys: KeySample) -> tuple[list[bytes], int | None]:
        """Return the keys of a prefix up to where it ends, or to the bucket in which it does, and that bucket."""
        chain: list[bytes] = []
        for number, first in enumerate(range(0, len(keys), BUCKET_CHUNKS)):
            places = range(first, min(first + BUCKET_CHUNKS, len(keys)))
            if all(map(keys.has, places)):
                part = [keys.at(at) for at in places]
            else:
                part = self._back(keys.at(places[-1]), len(places))
                if not part or part[0] != keys.at(first):
                    return chain, number if keys.at(first) in self.state.entries else None
            chain += part
            if not all(key in self.state.entries for key in part):
                break
        return chain, None

    def _back(self, key: bytes, count: int) -> list[bytes]:
        """Return `count` keys of a chain up to this one, which are all of one bucket; none if there are not as many."""
        part: list[bytes] = []
        entry = self.state.entries.get(key)
        bucket = entry.record.bucket if entry is not None else b""
        while entry is not None and entry.record.bucket == bucket and len(part) < count:
            part.insert(0, entry.record.key)
            entry = self.state.entries.get(entry.record.parent)
        return part if len(part) == count else []

    async def holders(self, chunks: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        return [nodes for _, nodes in await self.entries(chunks)]

    async def root_holders(self, keys: ChunkKeys) -> list[tuple[str, ...]]:
        """Return the holders of each chunk. Unlike the real index it also finds chunks with a parent."""
        entries = map(self.state.entries.get, keys)
        return [entry.nodes if entry is not None else () for entry in entries]

    async def entries(self, chunks: Sequence[ChunkRecord]) -> list[tuple[int, tuple[str, ...]]]:
        entries = (self.state.entries.get(chunk.key) for chunk in chunks)
        return [(entry.generation, entry.nodes) if entry is not None else (0, ()) for entry in entries]

    # ---- entries

    async def register(self, node_id: str, chunks: Sequence[ChunkRecord], now_ms: int, *, fresh: int = 0) -> list[int]:
        new = fresh or self._draw()
        return [self._register(node_id, chunk, new) for chunk in chunks]

    def _register(self, node_id: str, chunk: ChunkRecord, fresh: int) -> int:
        entry = self.state.entries.get(chunk.key)
        if entry is None and chunk.parent and chunk.parent not in self.state.entries:
            return 0
        if node_id == OBJECT_TIER and chunk.key in self.state.objects:
            if self.state.objects[chunk.key][0]:
                return 0
            del self.state.objects[chunk.key]
        if entry is None:
            entry = self.state.entries[chunk.key] = IndexEntry(chunk, fresh)
            if chunk.parent:
                self.state.entries[chunk.parent].children += 1
        if node_id not in entry.nodes:
            entry.nodes += (node_id,)
        self._show(node_id, chunk.key)
        return entry.generation

    def _show(self, node_id: str, key: bytes) -> None:
        self.state.dropped.get(node_id, {}).pop(key, None)
        self.state.hidden.get(key, {}).pop(node_id, None)

    async def unregister(
        self,
        node_id: str,
        chunks: Sequence[ChunkRecord],
        now_ms: int,
        *,
        only_in_object: bool = False,
        keepers: Sequence[str] = (),
        hidden: bool = False,
    ) -> list[bool]:
        out = []
        for chunk in chunks:
            entry = self.state.entries.get(chunk.key)
            nodes = entry.nodes if entry is not None else ()
            stays = only_in_object and OBJECT_TIER not in nodes
            if keepers:
                stays = stays or not set(keepers) <= set(nodes) - {node_id} or self._is_pinned(chunk.key, now_ms)
            out.append(not stays)
            if entry is not None:
                if hidden and not stays and node_id in nodes:
                    self.state.hidden.setdefault(chunk.key, {})[node_id] = entry.generation
                if not stays:
                    entry.nodes = tuple(name for name in nodes if name != node_id)
                if entry.is_hollow:
                    self._remove(entry)
        return out

    async def evict(self, chunks: Sequence[ChunkRecord], now_ms: int, delete_ms: int, *, asking: str = "") -> Evicted:
        removed: list[Gone] = []
        hidden: list[Gone] = []
        absent: list[bytes] = []
        for chunk in chunks:
            entry = self.state.entries.get(chunk.key)
            if entry is not None and (entry.children or self._is_pinned(chunk.key, now_ms)):
                continue
            copies = self.state.hidden.pop(chunk.key, {})
            hidden += [Gone(chunk, generation, (name,)) for name, generation in copies.items()]
            if entry is None:
                absent.append(chunk.key)
            else:
                removed.append(Gone(chunk, entry.generation, entry.nodes))
                if OBJECT_TIER in entry.nodes:
                    self.state.objects[chunk.key] = (False, delete_ms, chunk.bucket)
                self._remove(entry)
                copies |= dict.fromkeys(entry.nodes, entry.generation)
            for name, generation in copies.items():
                if name not in (asking, OBJECT_TIER):
                    drop = Drop(chunk.key, fingerprint(chunk.bucket), generation)
                    self.state.dropped.setdefault(name, {})[chunk.key] = drop
        return Evicted(tuple(removed), tuple(absent), tuple(hidden))

    def _remove(self, entry: IndexEntry) -> None:
        """And the chunks before it, as far as only it kept them."""
        going: IndexEntry | None = entry
        while going is not None:
            del self.state.entries[going.record.key]
            parent = self.state.entries.get(going.record.parent)
            pins = self.state.pins.pop(going.record.key, {})
            if parent is not None:
                parent_pins = self.state.pins.setdefault(parent.record.key, {}) if pins else {}
                for lease, expires_ms in pins.items():
                    parent_pins[lease] = max(expires_ms, parent_pins.get(lease, 0))
                parent.children -= 1
            going = parent if parent is not None and parent.is_hollow else None

    def _draw(self) -> int:
        return self._random.getrandbits(64) | 1

    async def tick(self) -> int:
        self.state.ticks += 1
        return self.state.ticks

    # ---- what nodes are listed for

    async def epoch(self) -> str:
        if not self.state.epoch:
            self.state.epoch = f"{self._random.getrandbits(64):016x}"
            await self.damaged()
        return self.state.epoch

    async def listings(self) -> dict[str, Listing]:
        counts, sums = Counter[str](), Counter[str]()
        for key, entry in self.state.entries.items():
            number = listing_number(fingerprint(key), entry.generation)
            for name in entry.nodes:
                counts[name] += 1
                sums[name] += number
        changes = self.state.changes
        return {
            name: Listing(counts[name], sums[name] % DIGEST_MODULUS, changes.get(name, 0))
            for name in sorted(counts.keys() | changes.keys())
        }

    async def listing(self, node_id: str) -> Listing:
        return (await self.listings()).get(node_id, Listing())

    async def count_change(self, node_id: str) -> None:
        self.state.changes[node_id] = self.state.changes.get(node_id, 0) + 1

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[Held], int]:
        entries = [entry for entry in self.state.entries.values() if node_id in entry.nodes]
        return [
            Held(fingerprint(entry.record.key), fingerprint(entry.record.bucket), entry.generation) for entry in entries
        ], 0

    async def sole(self, node_id: str, counted: Sequence[str]) -> int:
        entries = self.state.entries.values()
        return sum(node_id in entry.nodes and not set(counted) & {*entry.nodes} - {node_id} for entry in entries)

    async def unregister_held(self, node_id: str, holdings: Sequence[Held], now_ms: int) -> None:
        prints = {holding.fingerprint for holding in holdings}
        chunks = [entry.record for key, entry in self.state.entries.items() if fingerprint(key) in prints]
        await self.unregister(node_id, chunks, now_ms)

    async def drops(self, node_id: str, cursor: int) -> tuple[list[Drop], int]:
        return list(self.state.dropped.get(node_id, {}).values()), 0

    async def settle_drops(self, node_id: str, drops: Sequence[Drop]) -> None:
        recorded = self.state.dropped.get(node_id, {})
        for drop in drops:
            if recorded.get(drop.key) == drop:
                del recorded[drop.key]

    async def repair(self, cursor: int, *, older_ms: int | None = None) -> tuple[int, int]:
        """Children are counted with their entries here."""
        return 0, 0

    async def join(
        self, node_id: str, chunks: Sequence[ChunkRecord], generations: Sequence[int], *, only_in_object: bool
    ) -> list[bool]:
        pairs = zip(chunks, generations, strict=True)
        return [self._join(node_id, chunk.key, generation, only_in_object) for chunk, generation in pairs]

    def _join(self, node_id: str, key: bytes, generation: int, only_in_object: bool) -> bool:
        entry = self.state.entries.get(key)
        if entry is None or entry.generation != generation or (only_in_object and OBJECT_TIER not in entry.nodes):
            return False
        if node_id not in entry.nodes:
            entry.nodes += (node_id,)
        self._show(node_id, key)
        return True

    # ---- the object tier

    async def add_objects(self, chunks: Sequence[ChunkRecord], generations: Sequence[int]) -> list[ObjectMark]:
        marks = []
        for chunk, generation in zip(chunks, generations, strict=True):
            entry, deletion = self.state.entries.get(chunk.key), self.state.objects.get(chunk.key)
            if deletion is not None and deletion[0]:
                marks.append(ObjectMark.DELETING)
            elif entry is None or entry.generation != generation:
                marks.append(ObjectMark.GONE)
            else:
                self.state.objects.pop(chunk.key, None)
                if OBJECT_TIER not in entry.nodes:
                    entry.nodes += (OBJECT_TIER,)
                marks.append(ObjectMark.LISTED)
        return marks

    async def expect_objects(self, chunks: Sequence[ChunkRecord], delete_ms: int) -> list[bool]:
        return [self._expect(chunk, delete_ms) for chunk in chunks]

    def _expect(self, chunk: ChunkRecord, delete_ms: int) -> bool:
        entry, deletion = self.state.entries.get(chunk.key), self.state.objects.get(chunk.key)
        if deletion is not None and deletion[0]:
            return False
        if entry is None or OBJECT_TIER not in entry.nodes:
            due_ms = max(delete_ms, deletion[1]) if deletion is not None else delete_ms
            self.state.objects[chunk.key] = (False, due_ms, chunk.bucket)
        return True

    async def claim_objects(self, now_ms: int, until_ms: int, limit: int) -> list[ChunkRecord]:
        claimed: list[ChunkRecord] = []
        for key, (_, due_ms, bucket) in list(self.state.objects.items()):
            entry = self.state.entries.get(key)
            if entry is not None and OBJECT_TIER in entry.nodes:
                del self.state.objects[key]
            elif due_ms <= now_ms and entry is not None:
                self.state.objects[key] = (False, until_ms, bucket)
            elif due_ms <= now_ms and len(claimed) < limit:
                self.state.objects[key] = (True, until_ms, bucket)
                claimed.append(ChunkRecord(key, b"", bucket, b""))
        return claimed

    async def objects_deleted(self, chunks: Sequence[ChunkRecord], until_ms: int) -> None:
        for chunk in chunks:
            if self.state.objects.get(chunk.key) == (True, until_ms, chunk.bucket):
                del self.state.objects[chunk.key]

    async def unclaim_objects(self, chunks: Sequence[ChunkRecord], until_ms: int, delete_ms: int) -> None:
        for chunk in chunks:
            if self.state.objects.get(chunk.key) == (True, until_ms, chunk.bucket):
                self.state.objects[chunk.key] = (False, delete_ms, chunk.bucket)

    # ---- rebuilding

    async def damaged(self, *, anew: bool = False) -> None:
        if anew or not self.state.rebuild:
            self.state.rebuild = f"{self._random.getrandbits(64):016x}"

    async def rebuild(self) -> str:
        return self.state.rebuild

    async def rebuilt(self, token: str) -> None:
        if self.state.rebuild == token:
            self.state.rebuild, self.state.rebuilt = "", token

    async def last_rebuild(self) -> str:
        return self.state.rebuilt

    # ---- pins

    async def unpin(self, bucket: bytes, key: bytes, lease_id: bytes) -> bool:
        pins = self.state.pins.get(key, {})
        had_pin = pins.pop(lease_id, None) is not None
        if not pins:
            self.state.pins.pop(key, None)
        return had_pin

    async def unpin_all(self, keys: ChunkKeys, lease_id: bytes) -> int:
        return sum([await self.unpin(keys.bucket_of(at), keys.at(at), lease_id) for at in range(len(keys))])

    async def pins(self, bucket: bytes) -> int:
        """Return the count over all buckets."""
        return sum(len(pins) for pins in self.state.pins.values())

    def _pin(self, key: bytes, pin: Pin) -> None:
        for pinned_key in list(self.state.pins):
            self._is_pinned(pinned_key, pin.now_ms)
        pins = self.state.pins.setdefault(key, {})
        pins[pin.lease_id] = max(pin.expires_ms, pins.get(pin.lease_id, 0))

    def _is_pinned(self, key: bytes, now_ms: int) -> bool:
        pins = self.state.pins.get(key)
        if pins is None:
            return False
        alive = {lease: expires_ms for lease, expires_ms in pins.items() if expires_ms > now_ms}
        self.state.pins[key] = alive
        if not alive:
            del self.state.pins[key]
        return bool(alive)
