"""The prefix-closed index: which chunks exist, and which storage nodes hold them.

Closed means that a chunk is indexed only if the chunk before it is. Chains are cut into index buckets of 256 chunks,
named by the chunk that opens them; one is a Redis key or a few (`index_format`). Chunks are known by fingerprints: two
that share one cost a miss, as storage nodes compare whole keys.

Every key has one of 256 hash tags, by its bucket, so that a bucket is in one slot of a Redis Cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import Any, Final, cast

import numpy as np

from quire.model.fingerprints import PRINT_BYTES, fingerprint, fingerprints
from quire.model.index import DIGEST_MODULUS, Drop, Evicted, Gone, Held, Listing, Match, ObjectMark, Pin
from quire.model.keys import BUCKET_CHUNKS, KEY_BYTES, ChunkKeys, KeySample
from quire.model.records import ChunkRecord, ChunkRecords
from quire_server.redis.connection import metadata_errors
from quire_server.redis.prefix_index.batches import bucketfuls, independent, registrations
from quire_server.redis.prefix_index.bucket_scripts import LINK_BYTES, LINK_MS, BucketScripts
from quire_server.redis.prefix_index.format import bucket_parts, nodes_of, pin_arguments, runs_of
from quire_server.redis.prefix_index.slots import (
    PAGES,
    TAGS,
    bucket_key,
    bucket_of_page,
    drops_key,
    objects_key,
    pins_key,
    tag_of,
    tagged,
)

_EPOCH_KEY: Final = "quire:index-epoch"
_TICKS_KEY: Final = "quire:ticks"
_CHANGES_KEY: Final = "quire:changes"
_REBUILD_KEY: Final = b"quire:rebuild"
_REBUILT_KEY: Final = b"{quire:rebuild}:done"
_HELD_AT_ONCE: Final = 4096
_PAGES_COUNTED: Final = 256
_DROPS_TTL_MS: Final = 30 * 24 * 3_600_000
_DROPS_PAGE: Final = 1024
_TAG_SHIFT: Final = 48
_OBJECT_MARKS: Final = {ord("1"): ObjectMark.LISTED, ord("0"): ObjectMark.GONE, ord("!"): ObjectMark.DELETING}


class PrefixIndex(BucketScripts):
    """The index in Redis.

    A look-up is one call of one Redis; of a Redis Cluster it is one pipeline, bucket by bucket, and one call for a pin.
    `draw` makes the random bytes of generations.
    """

    async def match(self, keys: ChunkKeys | KeySample, pin: Pin | None = None) -> Match:
        """The longest indexed prefix of `keys`. `pin`: its last chunk is kept from that very moment on."""
        if len(keys) == 0:
            return Match(())
        if self._cluster:
            return await self._match_each(keys, pin)
        opener = fingerprint(keys.at(0))
        names, arguments = [bucket_key(opener)], [fingerprints(keys.packed), len(keys), BUCKET_CHUNKS]
        arguments += [*keys.whole_buckets, len(TAGS)]
        if pin is not None:
            names.append(pins_key(opener))
            arguments += pin_arguments(pin)
        return runs_of(await self._run("match", names, arguments))

    async def _match_each(self, keys: ChunkKeys | KeySample, pin: Pin | None) -> Match:
        """Match bucket by bucket. Chunks that are evicted between the match and the pin are looked up again."""
        while True:
            match = runs_of(await self._match_buckets(keys))
            if pin is None or not match.count or match.wanted_bucket is not None:
                return match
            opener = fingerprint(keys.bucket_of(match.count - 1))
            arguments = [fingerprint(keys.at(match.count - 1)), *pin_arguments(pin)]
            if await self._run("pin", [bucket_key(opener), pins_key(opener)], arguments):
                return match

    async def register(self, node_id: str, chunks: Sequence[ChunkRecord], now_ms: int, *, fresh: int = 0) -> list[int]:
        """List `node_id` as a holder of `chunks`, parents before children; the generations of their entries.

        `fresh`: generation of entries that are new, which no other call may propose; 0: drawn here.

        0 for a chunk whose parent is not indexed, because indexing it would break the closure, for one whose
        fingerprint another chunk of its bucket has, and for the object tier where the object is being deleted.
        """
        new = (fresh or int.from_bytes(self._draw(8), "big") | 1).to_bytes(8, "big")
        generations: list[int] = []
        records = ChunkRecords.of(chunks)
        for is_linked, parts in groupby(bucketfuls(records), key=lambda part: part.first_is_linked):
            if is_linked:
                for part in parts:
                    own = records[part.first : part.first + part.size]
                    generations += await self._register_linked(node_id, own, now_ms, new)
            else:
                calls = registrations(node_id, list(parts))
                marks = await self._change_each("register", calls, [node_id, new, b"", 0])
                generations += _generations(b"".join(marks))
        return generations

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
        """Remove `node_id` from the holders of these; return for each whether it is no holder now.

        An entry without holders goes when nothing extends it, and its parents with it if nothing else keeps them.
        `only_in_object`: skip chunks that the object tier is not listed for; `keepers`: skip those that any of these is
        not listed for, or a lease pins. Either way skip also chunks that are not indexed: an index that went back does
        not know who else has it. `hidden`: the node keeps its copies, and is to drop them if the chunks are evicted,
        unless it is listed again before.
        """
        out: list[bool] = []
        kept_ms = _DROPS_TTL_MS if hidden else ""
        common = [node_id, now_ms, "1" if only_in_object else "", ",".join(keepers), kept_ms]
        for parts in independent(bucketfuls(chunks)):
            calls = [(part.name, part.prints) for part in parts]
            out += await self._unregister(calls, common, now_ms)
        return out

    async def unregister_held(self, node_id: str, holdings: Sequence[Held], now_ms: int) -> None:
        """Remove `node_id` from the holders of these, which `holdings` returned."""
        ordered = sorted(holdings, key=lambda holding: holding.bucket)
        calls = [
            (bucket, b"".join(holding.fingerprint for holding in group))
            for bucket, group in groupby(ordered, key=lambda holding: holding.bucket)
        ]
        await self._unregister(calls, [node_id, now_ms, "", "", ""], now_ms)

    async def _unregister(
        self, prints: Sequence[tuple[bytes, bytes]], common: Sequence[Any], now_ms: int
    ) -> list[bool]:
        """Remove a node from the holders of chunks, by bucket. `common`: arguments of the script."""
        out: list[bool] = []
        calls = [(bucket, [part]) for bucket, part in prints]
        for mask, *orphaned in await self._change_each("unregister", calls, common):
            await self._unlink(orphaned, now_ms)
            out += [mark == ord("1") for mark in mask]
        return out

    async def evict(self, chunks: Sequence[ChunkRecord], now_ms: int, delete_ms: int, *, asking: str = "") -> Evicted:
        """Take chunks, children before parents, out of the index; those that others extend or leases pin stay.

        What each holder but `asking` has to drop is recorded in the same instant (`drops`). Objects of theirs are to be
        deleted at `delete_ms`, unless an entry lists them again by then.
        """
        removed: list[Gone] = []
        hidden: list[Gone] = []
        absent: list[bytes] = []
        for parts in independent(bucketfuls(chunks)):
            calls = [(part.name, [part.prints, part.keys, part.bucket]) for part in parts]
            answers = await self._change_each("evict", calls, [now_ms, delete_ms, asking, _DROPS_TTL_MS])
            for part, (count, *rest) in zip(parts, answers, strict=True):
                group, unseen = chunks[part.first : part.first + part.size], count + part.size
                for chunk, answer in zip(group, rest[count:unseen], strict=True):
                    if answer == b"absent":
                        absent.append(chunk.key)
                    elif answer != b"kept":
                        removed.append(_gone(chunk, answer))
                hidden += [
                    _gone(group[at], copy) for at, copy in zip(rest[unseen::2], rest[unseen + 1 :: 2], strict=True)
                ]
                await self._unlink(rest[:count], now_ms)
        return Evicted(tuple(removed), tuple(absent), tuple(hidden))

    async def holders(self, chunks: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        """The nodes that hold each of `chunks`."""
        return [nodes for _, nodes in await self.entries(chunks)]

    async def root_holders(self, keys: ChunkKeys) -> list[tuple[str, ...]]:
        """Return the nodes that hold each of these roots. Each root has its own bucket."""
        prints, packed = fingerprints(keys.packed), list[bytes]()
        for at in range(0, len(prints), _HELD_AT_ONCE * PRINT_BYTES):
            part = prints[at : at + _HELD_AT_ONCE * PRINT_BYTES]
            packed += await self._entries_of(part, part)
        return [nodes_of(entry[8:]) for entry in packed]

    async def entries(self, chunks: Sequence[ChunkRecord]) -> list[tuple[int, tuple[str, ...]]]:
        """Return for each chunk the generation of its entry, 0 for none, and the nodes that hold it."""
        packed: list[bytes] = []
        records = ChunkRecords.of(chunks)
        for at in range(0, len(records), _HELD_AT_ONCE):
            part = records[at : at + _HELD_AT_ONCE]
            packed += await self._entries_of(fingerprints(part.buckets), fingerprints(part.keys))
        return [(int.from_bytes(entry[:8], "big"), nodes_of(entry[8:])) for entry in packed]

    async def _entries_of(self, buckets: bytes, prints: bytes) -> list[bytes]:
        """Return packed entries. `buckets` and `prints`: fingerprints of each chunk's bucket, and of the chunk."""
        starts = range(0, len(prints), PRINT_BYTES)
        names = [bucket_key(buckets[at : at + PRINT_BYTES]) for at in starts]
        if not self._cluster:
            return cast(list[bytes], await self._run("holders", names, [prints]))
        runs = [list(run) for _, run in groupby(starts, key=lambda at: names[at // PRINT_BYTES])]
        calls = [([names[run[0] // PRINT_BYTES]] * len(run), [prints[run[0] : run[-1] + PRINT_BYTES]]) for run in runs]
        return [entry for entries in await self._all("holders", calls) for entry in entries]

    async def epoch(self) -> str:
        """Random name of this index, given at the first call: an index that was lost has another.

        A new one does not know the contents of the object tier.
        """
        async with metadata_errors():
            while True:
                if await self._client.set(_EPOCH_KEY, self._draw(8).hex(), nx=True):
                    await self.damaged()
                name = cast(bytes | None, await self._client.get(_EPOCH_KEY))
                if name is not None:  # else it was lost in between
                    return name.decode()

    async def tick(self) -> int:
        """Return a number greater than all before. A smaller one proves that the index went back."""
        async with metadata_errors():
            return int(await self._client.incr(_TICKS_KEY))

    # ---- what nodes are listed for

    async def listings(self, only: str = "") -> dict[str, Listing]:
        """Return, for every node that was ever listed, or one, the number of its chunks, and their digest."""
        tags = [TAGS] if not self._cluster else [[tag] for tag in TAGS]
        answers = await self._all("listings", [([tagged(b"l", tag) for tag in part], [only]) for part in tags])
        changes = await self._changes(only)
        counts = dict.fromkeys(changes, (0, 0))
        for flat in answers:
            for name, count, digest in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
                total = counts.get(name, (0, 0))
                counts[name] = total[0] + int(count), (total[1] + int(digest)) % DIGEST_MODULUS
        return {
            name.decode(): Listing(count, digest, int(changes.get(name, b"0")))
            for name, (count, digest) in counts.items()
        }

    async def _changes(self, only: str) -> dict[bytes, bytes]:
        async with metadata_errors():
            if only:
                return {only.encode(): cast(bytes, await self._client.hget(_CHANGES_KEY, only)) or b"0"}
            return cast(dict[bytes, bytes], await self._client.hgetall(_CHANGES_KEY))

    async def listing(self, node_id: str) -> Listing:
        """Return the listing of one node."""
        return (await self.listings(node_id)).get(node_id, Listing())

    async def count_change(self, node_id: str) -> None:
        """A node has reported something. To be called when it is done, and before the node is answered."""
        async with metadata_errors():
            await self._client.hincrby(_CHANGES_KEY, node_id, 1)

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[Held], int]:
        """Return a page of a node's listing, and the next cursor, 0 at the end.

        A chunk that is listed all the while is in one page at least.
        """
        async with metadata_errors():
            names, next_cursor = await self._scan(cursor, PAGES, "string")
        holdings: list[Held] = []
        for name, packed in zip(names, await self._all("held", [([name], [node_id]) for name in names]), strict=True):
            bucket = bucket_of_page(name)
            for at in range(0, len(packed), 2 * PRINT_BYTES):
                middle, end = at + PRINT_BYTES, at + 2 * PRINT_BYTES
                holdings.append(Held(packed[at:middle], bucket, int.from_bytes(packed[middle:end], "big")))
        return holdings, next_cursor

    async def sole(self, node_id: str, counted: Sequence[str]) -> int:
        """Return how many chunks a node is listed for that none of the `counted` holders is listed for.

        A chunk that is listed all the while is counted once at least.
        """
        total, cursor, unfinished = 0, 0, True
        while unfinished:
            async with metadata_errors():
                names, cursor = await self._scan(cursor, PAGES, "string", _PAGES_COUNTED)
            together = [[name] for name in names] if self._cluster else [names]
            total += sum(await self._all("sole", [(keys, [node_id, *counted]) for keys in together if keys]))
            unfinished = cursor != 0
        return total

    async def drops(self, node_id: str, cursor: int) -> tuple[list[Drop], int]:
        """A page of what `node_id` is to drop, and the next cursor, 0 at the end.

        One is kept until it is settled, or the node registers the chunk again.
        """
        number, at = cursor >> _TAG_SHIFT, cursor & ((1 << _TAG_SHIFT) - 1)
        async with metadata_errors():
            if not at:
                pipeline = self._client.pipeline(transaction=False)
                for tag in TAGS[number:]:
                    pipeline.exists(drops_key(node_id, tag))
                presence = await pipeline.execute()
                if not any(presence):
                    return [], 0
                number += presence.index(1)
            page_cursor, fields = await self._client.hscan(drops_key(node_id, TAGS[number]), at, count=_DROPS_PAGE)
        in_tag = int(page_cursor)
        next_cursor = in_tag | number << _TAG_SHIFT if in_tag else (number + 1) << _TAG_SHIFT
        page = [Drop(value[8:40], value[40:], int.from_bytes(value[:8], "big")) for value in cast(Any, fields).values()]
        return page, next_cursor if next_cursor >> _TAG_SHIFT < len(TAGS) else 0

    async def settle_drops(self, node_id: str, drops: Sequence[Drop]) -> None:
        """`node_id` has carried these out."""
        calls = list[tuple[list[bytes], list[Any]]]()
        ordered = sorted(drops, key=lambda drop: tag_of(drop.bucket))
        for tag, group in groupby(ordered, key=lambda drop: tag_of(drop.bucket)):
            part = list(group)
            prints = fingerprints(b"".join(drop.key for drop in part))
            generations = b"".join(drop.generation.to_bytes(8, "big") for drop in part)
            calls.append(([drops_key(node_id, tag)], [prints, generations]))
        if calls:
            await self._all("settle", calls)

    async def join(
        self, node_id: str, chunks: Sequence[ChunkRecord], generations: Sequence[int], *, only_in_object: bool
    ) -> list[bool]:
        """List `node_id` in these very entries; False for one that has ended.

        `only_in_object`: also for one that does not list the object tier.
        """
        remaining = iter(generations)
        parts = bucketfuls(chunks)
        calls = [(part.name, [part.prints, _packed(islice(remaining, part.size))]) for part in parts]
        masks = await self._change_each("join", calls, [node_id, "1" if only_in_object else ""])
        return [mark == ord("1") for mask in masks for mark in mask]

    # ---- the object tier

    async def add_objects(self, chunks: Sequence[ChunkRecord], generations: Sequence[int]) -> list[ObjectMark]:
        """List the object tier in these very entries."""
        remaining = iter(generations)
        calls = [
            (part.name, [part.prints, _packed(islice(remaining, part.size)), part.keys, part.bucket])
            for part in bucketfuls(chunks)
        ]
        return [_OBJECT_MARKS[mark] for mask in await self._change_each("add_objects", calls) for mark in mask]

    async def expect_objects(self, chunks: Sequence[ChunkRecord], delete_ms: int) -> list[bool]:
        """Announce objects that are about to be written, and schedule their deletion.

        They are deleted at `delete_ms` or later, once their keys have no entry. False for a key whose objects are being
        deleted at this moment.
        """
        calls = [(part.name, [part.prints, part.keys, part.bucket]) for part in bucketfuls(chunks)]
        return [mark != ord("!") for mask in await self._change_each("expect", calls, [delete_ms]) for mark in mask]

    async def claim_objects(self, now_ms: int, until_ms: int, limit: int) -> list[ChunkRecord]:
        """Claim up to `limit` keys without an entry whose objects are due, for deletion before `until_ms`.

        No entry lists objects of these keys before that time, unless `objects_deleted` or `unclaim_objects` is called.
        """
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for tag in TAGS:
                pipeline.zrangebyscore(tagged(b"due", tag), 0, now_ms, 0, limit)
            due_names = [name for answer in await pipeline.execute() for name in answer][:limit]
        chunks = [ChunkRecord(name[KEY_BYTES:], b"", name[:KEY_BYTES], b"") for name in due_names]
        calls = [(part.name, [part.prints, part.keys, part.bucket]) for part in bucketfuls(chunks)]
        answers = await self._change_each("claim", calls, [now_ms, until_ms])
        marks = [mark for mask in answers for mark in mask]
        return [chunk for chunk, mark in zip(chunks, marks, strict=True) if mark == ord("1")]

    async def objects_deleted(self, chunks: Sequence[ChunkRecord], until_ms: int) -> None:
        """Record the deletion of objects whose claim ends at `until_ms`."""
        await self._end_claim(chunks, until_ms, "")

    async def unclaim_objects(self, chunks: Sequence[ChunkRecord], until_ms: int, delete_ms: int) -> None:
        """Give claims up. The objects may be claimed again from `delete_ms` on (Unix epoch)."""
        await self._end_claim(chunks, until_ms, delete_ms)

    async def _end_claim(self, chunks: Sequence[ChunkRecord], until_ms: int, delete_ms: int | str) -> None:
        for part in bucketfuls(chunks):
            keys = [objects_key(part.name), tagged(b"due", tag_of(part.name))]
            await self._run("end_claim", keys, [part.keys, until_ms, part.bucket, delete_ms])

    # ---- rebuilding

    async def damaged(self, *, anew: bool = False) -> None:
        """Request a rebuild from the object tier, because entries were lost.

        `anew`: a rebuild that is already running does not satisfy the request.
        """
        async with metadata_errors():
            await self._client.set(_REBUILD_KEY, self._draw(8).hex(), nx=not anew)

    async def rebuild(self) -> str:
        """The rebuilding that is wanted, "" for none."""
        async with metadata_errors():
            return (cast(bytes, await self._client.get(_REBUILD_KEY)) or b"").decode()

    async def rebuilt(self, token: str) -> None:
        """That one is done."""
        await self._run("rebuilt", [_REBUILD_KEY, _REBUILT_KEY], [token])

    async def last_rebuild(self) -> str:
        """Return the last completed rebuild, "" for none."""
        async with metadata_errors():
            return (cast(bytes, await self._client.get(_REBUILT_KEY)) or b"").decode()

    # ---- pins

    async def unpin(self, bucket: bytes, key: bytes, lease_id: bytes) -> bool:
        """Give a pin back; whether it was held."""
        async with metadata_errors():
            return bool(await self._client.hdel(pins_key(fingerprint(bucket)), fingerprint(key) + lease_id))

    async def unpin_all(self, keys: ChunkKeys, lease_id: bytes) -> int:
        """Give back what pins of this id are on any of the keys; how many were held."""
        prints, step = fingerprints(keys.packed), BUCKET_CHUNKS * PRINT_BYTES
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for at in range(0, len(prints), step):
                part = prints[at : at + step]
                pins = (part[at : at + PRINT_BYTES] + lease_id for at in range(0, len(part), PRINT_BYTES))
                pipeline.hdel(pins_key(part[:PRINT_BYTES]), *pins)
            return sum(await pipeline.execute())

    async def pins(self, bucket: bytes) -> int:
        """How many pins a bucket has; expired ones count for ten seconds more."""
        async with metadata_errors():
            fields = await self._client.hkeys(pins_key(fingerprint(bucket)))
            return len([name for name in fields if len(name) > PRINT_BYTES])

    # ----

    async def _register_linked(self, node_id: str, chunks: ChunkRecords, now_ms: int, fresh: bytes) -> list[int]:
        """Register chunks of one bucket, the first of which has its parent in another one.

        The parent is kept for the child before that is registered. A crash in between leaves the parent kept too long,
        never the chain open.
        """
        opener, bucket = chunks[0], fingerprint(chunks[0].bucket)
        parent, elsewhere, child = map(fingerprint, (opener.parent, opener.parent_bucket, opener.key))
        name = self._draw(LINK_BYTES)
        until_ms = int(await self._change("link", elsewhere, [parent, child, name, LINK_MS]))
        if not until_ms:
            return [0] * len(chunks)
        ((_, own),) = registrations(node_id, bucketfuls(chunks))
        arguments = [node_id, fresh, elsewhere + name, until_ms, *own]
        answer = await self._change("register", bucket, arguments)
        generations = _generations(answer[: 9 * len(chunks)])
        if answer[9 * len(chunks) :] != name:  # it is refused, or there by another link
            await self._unlink([parent, elsewhere + name, child, b""], now_ms)
        return generations

    async def _match_buckets(self, keys: ChunkKeys | KeySample) -> list[Any]:
        parts = list(bucket_parts(keys))
        calls: list[tuple[list[bytes], list[Any]]] = [
            ([bucket_key(prints[:PRINT_BYTES])], [prints, size, BUCKET_CHUNKS, 0, int(is_whole), len(TAGS)])
            for prints, size, is_whole in parts
        ]
        flat: list[Any] = [0]
        answers = await self._all("match", calls)
        for number, ((_, size, _), (state, *runs)) in enumerate(zip(parts, answers, strict=True)):
            flat += runs
            if state < 0:
                flat[0] = -number - 1
            elif runs:
                flat[0] = state
            if sum(runs[::2]) < size:
                break
        return flat


def _gone(chunk: ChunkRecord, packed: bytes) -> Gone:
    """`packed`: generation and placement."""
    return Gone(chunk, int.from_bytes(packed[:8], "big"), nodes_of(packed[8:]))


def _packed(generations: Iterable[int]) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in generations)


def _generations(marks: bytes) -> list[int]:
    numbers = np.frombuffer(marks, np.uint8).reshape(-1, 9)[:, 1:]
    return cast(list[int], np.ascontiguousarray(numbers).view(">u8")[:, 0].tolist())
