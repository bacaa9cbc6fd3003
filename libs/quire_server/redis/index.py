"""The prefix-closed index: which chunks exist, and which storage nodes hold them.

Closed means that a chunk is indexed only if the chunk before it is. Chains are cut into buckets of 256 chunks, named by
the chunk that opens them; a bucket is one Redis key or a few (`scripts`). Chunks are known by fingerprints: two that
share one cost a miss, as storage nodes compare whole keys.

Every key has one of 256 hash tags, by its bucket, so that a bucket lies in one slot of a Redis Cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, cast

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError

from quire.model.fingerprints import PRINT_BYTES, fingerprint, fingerprints
from quire.model.index import (
    DIGEST_MODULUS,
    OBJECT_TIER,
    ChunkRecord,
    Evicted,
    Gone,
    Held,
    Listing,
    Match,
    ObjectMark,
    Pin,
)
from quire.model.keys import BUCKET_CHUNKS, KEY_BYTES, ChunkKeys
from quire_server.redis import scripts
from quire_server.redis.connection import is_cluster, metadata_errors
from quire_server.redis.old_format import let_old_format_expire
from quire_server.redis.scripts import nodes_of, pin_arguments, runs_of
from quire_server.redis.slots import (
    PAGES,
    TAGS,
    bucket_key,
    bucket_keys,
    bucket_of_page,
    objects_key,
    pins_key,
    tag_of,
    tagged,
)

_NO_PARENT: Final = bytes(PRINT_BYTES)
_EPOCH_KEY: Final = "quire:index-epoch"
_CHANGES_KEY: Final = "quire:changes"
_REBUILD_KEY: Final = "quire:rebuild"
_SCANNED: Final = 16
"""Pages read at a time, of up to 256 chunks each, so that reading them does not hold up other requests."""
_AT_ONCE: Final = 64
_HELD_AT_ONCE: Final = 4096
_DROPS_TTL_S: Final = 30 * 24 * 3600
_MASTER_SHIFT: Final = 56
_OBJECT_MARKS: Final = {ord("1"): ObjectMark.LISTED, ord("0"): ObjectMark.GONE, ord("!"): ObjectMark.DELETING}


class PrefixIndex:
    """A look-up is one call of one Redis; of a Redis Cluster it is one pipeline, bucket by bucket, and one call for a
    pin. `draw` makes the random bytes of generations.
    """

    def __init__(self, client: redis.Redis, *, draw: Callable[[int], bytes] = os.urandom) -> None:
        self._client = client
        self._cluster = is_cluster(client)
        self._draw = draw
        self._scripts = {name: client.register_script(text) for name, text in scripts.sources().items()}

    async def match(self, keys: ChunkKeys, pin: Pin | None = None) -> Match:
        """The longest indexed prefix of `keys`. `pin`: its last chunk is kept from that very moment on."""
        if len(keys) == 0:
            return Match(())
        prints = fingerprints(keys.packed)
        step = BUCKET_CHUNKS * PRINT_BYTES
        openers = [prints[at : at + PRINT_BYTES] for at in range(0, len(prints), step)]
        if self._cluster:
            return await self._match_each(prints, openers, pin)
        names, arguments = [bucket_key(each) for each in openers], [prints, BUCKET_CHUNKS, len(openers)]
        if pin is not None:
            names += [pins_key(each) for each in openers]
            arguments += pin_arguments(pin)
        return runs_of(await self._run("match", names, arguments))

    async def _match_each(self, prints: bytes, openers: list[bytes], pin: Pin | None) -> Match:
        """Bucket by bucket. What goes between the match and the pin is looked up again."""
        while True:
            match = runs_of(await self._match_buckets(prints, openers))
            if pin is None or not match.count:
                return match
            tip = (match.count - 1) * PRINT_BYTES
            opener = openers[(match.count - 1) // BUCKET_CHUNKS]
            arguments = [prints[tip : tip + PRINT_BYTES], *pin_arguments(pin)]
            if await self._run("pin", [bucket_key(opener), pins_key(opener)], arguments):
                return match

    async def register(self, node_id: str, chunks: Sequence[ChunkRecord], now_ms: int) -> list[int]:
        """List `node_id` as a holder of `chunks`, parents before children; the generations of their entries.

        0 for a chunk whose parent is not indexed, because indexing it would break the closure, for one whose
        fingerprint another chunk of its bucket has, and for the object tier where the object is being deleted.
        """
        groups = [(bucket, list(group)) for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket)]
        generations: list[int] = []
        if not any(group[0].parent for _, group in groups):  # roots wait for nothing
            for at in range(0, len(groups), _AT_ONCE):
                generations += await self._register_roots(node_id, groups[at : at + _AT_ONCE])
            return generations
        for bucket, group in groups:
            generations += await self._register_bucket(node_id, fingerprint(bucket), group, now_ms)
        return generations

    async def unregister(
        self,
        node_id: str,
        chunks: Sequence[ChunkRecord],
        now_ms: int,
        *,
        only_in_object: bool = False,
        others_min: int = 0,
    ) -> list[bool]:
        """`node_id` holds these no more; for each whether that is so now.

        An entry without holders goes when nothing extends it, and its parents with it if that is all that kept them.
        `only_in_object`: leave alone what the object tier is not listed for; `others_min`: what fewer other nodes have.
        Either way also what is not indexed: an index that went back does not know who else has it.
        """
        out: list[bool] = []
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            prints = fingerprints(_keys(list(group)))
            arguments = [node_id, prints, now_ms, "1" if only_in_object else "", others_min]
            out += await self._unregister(fingerprint(bucket), arguments, now_ms)
        return out

    async def unregister_held(self, node_id: str, held: Sequence[Held], now_ms: int) -> None:
        """`node_id` holds these no more, which `holdings` has told of."""
        for bucket, group in groupby(sorted(held, key=lambda each: each.bucket), key=lambda each: each.bucket):
            prints = b"".join(each.fingerprint for each in group)
            await self._unregister(bucket, [node_id, prints, now_ms, "", 0], now_ms)

    async def _unregister(self, bucket: bytes, arguments: list[Any], now_ms: int) -> list[bool]:
        mask, *orphaned = await self._change("unregister", bucket, arguments)
        await self._uncount(orphaned, now_ms)
        return [mark == ord("1") for mark in mask]

    async def evict(self, chunks: Sequence[ChunkRecord], now_ms: int, delete_ms: int) -> Evicted:
        """Take chunks, children before parents, out of the index; those that others extend or leases pin stay.

        Objects of theirs are to be deleted at `delete_ms`, unless an entry lists them again by then.
        """
        removed: list[Gone] = []
        absent: list[bytes] = []
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            part, opener = list(group), fingerprint(bucket)
            keys = _keys(part)
            count, *rest = await self._change("evict", opener, [now_ms, fingerprints(keys), delete_ms, keys])
            due = list[ChunkRecord]()
            for chunk, answer in zip(part, rest[count:], strict=True):
                if answer == b"absent":
                    absent.append(chunk.key)
                elif answer != b"kept":
                    gone = Gone(chunk, int.from_bytes(answer[:8], "big"), nodes_of(answer[8:]))
                    removed.append(gone)
                    due += [chunk] if OBJECT_TIER in gone.nodes else []
            await self._uncount(rest[:count], now_ms)
            await self._will_delete(opener, due, delete_ms)
        return Evicted(tuple(removed), tuple(absent))

    async def holders(self, chunks: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        """The nodes that hold each of `chunks`."""
        placements: list[bytes] = []
        if not self._cluster:
            for at in range(0, len(chunks), _HELD_AT_ONCE):
                part = chunks[at : at + _HELD_AT_ONCE]
                names = [bucket_key(fingerprint(chunk.bucket)) for chunk in part]
                placements += await self._run("holders", names, [fingerprints(_keys(part))])
            return [nodes_of(placement) for placement in placements]
        calls: list[tuple[list[bytes], list[Any]]] = []
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            records = list(group)
            calls.append(([bucket_key(fingerprint(bucket))] * len(records), [fingerprints(_keys(records))]))
        for found in await self._all("holders", calls):
            placements += found
        return [nodes_of(placement) for placement in placements]

    async def epoch(self) -> str:
        """Random name of this index, given when it is first asked for: an index that was lost has another.

        A new one does not know what lies in the object tier.
        """
        async with metadata_errors():
            if await self._client.set(_EPOCH_KEY, self._draw(8).hex(), nx=True):
                await let_old_format_expire(self._client)
                await self.damaged()
            return str(cast(bytes, await self._client.get(_EPOCH_KEY)).decode())

    # ---- what nodes are listed for

    async def listings(self, only: str = "") -> dict[str, Listing]:
        """For every node that was ever listed, or one, how many chunks it is listed for, and their digest."""
        tags = [TAGS] if not self._cluster else [[tag] for tag in TAGS]
        found = await self._all("listings", [([tagged(b"l", tag) for tag in part], [only]) for part in tags])
        changes = await self._changes(only)
        counts = dict.fromkeys(changes, (0, 0))
        for flat in found:
            for name, count, digest in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
                before = counts.get(name, (0, 0))
                counts[name] = before[0] + int(count), (before[1] + int(digest)) % DIGEST_MODULUS
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
        """Of one node."""
        return (await self.listings(node_id)).get(node_id, Listing())

    async def count_change(self, node_id: str) -> None:
        """A node has reported something. To be called when it is done, and before the node is answered."""
        async with metadata_errors():
            await self._client.hincrby(_CHANGES_KEY, node_id, 1)

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[Held], int]:
        """A page of what is listed for a node, and the next cursor, 0 at the end. A chunk that is listed all the while
        is in one page at least.
        """
        async with metadata_errors():
            names, after = await self._scan(cursor)
        found: list[Held] = []
        for name, packed in zip(names, await self._all("held", [([name], [node_id]) for name in names]), strict=True):
            bucket = bucket_of_page(name)
            for at in range(0, len(packed), 2 * PRINT_BYTES):
                middle, end = at + PRINT_BYTES, at + 2 * PRINT_BYTES
                found.append(Held(packed[at:middle], bucket, int.from_bytes(packed[middle:end], "big")))
        return found, after

    async def _scan(self, cursor: int) -> tuple[list[bytes], int]:
        """Some pages; of a Cluster one master after the other: its number is in the cursor's upper bits."""
        if not self._cluster:
            scanned = await self._client.scan(cursor, match=PAGES, count=_SCANNED, _type="string")
            after, names = cast(tuple[int, list[bytes]], scanned)
            return names, int(after)
        cluster = await cast(RedisCluster, self._client).initialize()
        masters = sorted(cluster.get_primaries(), key=lambda node: str(node.name))
        number, at = cursor >> _MASTER_SHIFT, cursor & ((1 << _MASTER_SHIFT) - 1)
        if number >= len(masters):
            return [], 0
        master = masters[number]
        scanning: Any = cluster.scan(at, match=PAGES, count=_SCANNED, _type="string", target_nodes=master)
        cursors, names = await scanning
        if after := int(cursors[master.name]):
            return names, (number << _MASTER_SHIFT) | after
        return names, (number + 1) << _MASTER_SHIFT if number + 1 < len(masters) else 0

    async def remember_drops(self, node_id: str, generations: Mapping[bytes, int]) -> None:
        """Entries that ended while `node_id` could not be told."""
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hset(_drops_key(node_id), mapping={key: str(each) for key, each in generations.items()})
            pipeline.expire(_drops_key(node_id), _DROPS_TTL_S)
            await pipeline.execute()

    async def take_drops(self, node_id: str) -> dict[bytes, int]:
        """What `remember_drops` remembered, once."""
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hgetall(_drops_key(node_id))
            pipeline.delete(_drops_key(node_id))
            return {key: int(generation) for key, generation in (await pipeline.execute())[0].items()}

    # ---- the object tier

    async def add_objects(self, chunks: Sequence[ChunkRecord], generations: Sequence[int]) -> list[ObjectMark]:
        """List the object tier in these very entries."""
        marks: list[ObjectMark] = []
        pairs = zip(chunks, generations, strict=True)
        for bucket, group in groupby(pairs, key=lambda pair: pair[0].bucket):
            part, opener = list(group), fingerprint(bucket)
            keys = _keys([chunk for chunk, _ in part])
            packed = b"".join(each.to_bytes(8, "big") for _, each in part)
            mask = await self._change("add_objects", opener, [fingerprints(keys), packed, keys])
            marks += [_OBJECT_MARKS[mark] for mark in mask]
            await self._not_due(
                opener, [chunk for (chunk, _), mark in zip(part, mask, strict=True) if mark == ord("1")]
            )
        return marks

    async def expect_objects(self, chunks: Sequence[ChunkRecord], delete_ms: int) -> list[bool]:
        """Objects that are about to be written, or that no entry lists: to be deleted at `delete_ms` or later, unless
        one lists them by then. False for one that is being deleted just now.
        """
        marks: list[bool] = []
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            part, opener = list(group), fingerprint(bucket)
            keys = _keys(part)
            mask = await self._change("expect", opener, [fingerprints(keys), delete_ms, keys])
            noted = [chunk for chunk, mark in zip(part, mask, strict=True) if mark == ord("1")]
            await self._will_delete(opener, noted, delete_ms)
            marks += [mark != ord("!") for mark in mask]
        return marks

    async def claim_objects(self, now_ms: int, until_ms: int, limit: int) -> list[ChunkRecord]:
        """Objects whose time has come: to be deleted by the caller, who has until `until_ms`. Until then, or until
        `objects_deleted` says so, no entry lists them.
        """
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for tag in TAGS:
                pipeline.zrangebyscore(tagged(b"due", tag), 0, now_ms, 0, limit)
            due = [each for found in await pipeline.execute() for each in found][:limit]
        chunks = [ChunkRecord(each[KEY_BYTES:], b"", each[:KEY_BYTES], b"") for each in due]
        claimed: list[ChunkRecord] = []
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            part, opener = list(group), fingerprint(bucket)
            keys = _keys(part)
            mask = await self._change("claim", opener, [fingerprints(keys), now_ms, until_ms, keys])
            claimed += [chunk for chunk, mark in zip(part, mask, strict=True) if mark == ord("1")]
            await self._not_due(opener, [chunk for chunk, mark in zip(part, mask, strict=True) if mark == ord("0")])
            later = [chunk for chunk, mark in zip(part, mask, strict=True) if mark != ord("0")]
            await self._will_delete(opener, later, until_ms)
        return claimed

    async def objects_deleted(self, chunks: Sequence[ChunkRecord], until_ms: int) -> None:
        """What was claimed until then is deleted."""
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            part, opener = list(group), fingerprint(bucket)
            await self._run("deleted", [objects_key(opener)], [_keys(part), until_ms])
            await self._not_due(opener, part)

    async def _will_delete(self, bucket: bytes, chunks: Sequence[ChunkRecord], due_ms: int) -> None:
        if chunks:
            members: dict[Any, Any] = {chunk.bucket + chunk.key: due_ms for chunk in chunks}
            async with metadata_errors():
                await self._client.zadd(tagged(b"due", tag_of(bucket)), members)

    async def _not_due(self, bucket: bytes, chunks: Sequence[ChunkRecord]) -> None:
        if chunks:
            async with metadata_errors():
                await self._client.zrem(tagged(b"due", tag_of(bucket)), *(chunk.bucket + chunk.key for chunk in chunks))

    # ---- rebuilding

    async def damaged(self) -> None:
        """Entries were lost: what lies in the object tier has to be registered again."""
        async with metadata_errors():
            await self._client.set(_REBUILD_KEY, self._draw(8).hex(), nx=True)

    async def rebuild(self) -> str:
        """The rebuilding that is wanted, "" for none."""
        async with metadata_errors():
            return (cast(bytes, await self._client.get(_REBUILD_KEY)) or b"").decode()

    async def rebuilt(self, token: str) -> None:
        """That one is done."""
        async with metadata_errors():
            if await self.rebuild() == token:
                await self._client.delete(_REBUILD_KEY)

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
                pins = (part[each : each + PRINT_BYTES] + lease_id for each in range(0, len(part), PRINT_BYTES))
                pipeline.hdel(pins_key(part[:PRINT_BYTES]), *pins)
            return sum(await pipeline.execute())

    async def pins(self, bucket: bytes) -> int:
        """How many pins a bucket has; expired ones count for ten seconds more."""
        async with metadata_errors():
            held = await self._client.hkeys(pins_key(fingerprint(bucket)))
            return len([name for name in held if len(name) > PRINT_BYTES])

    # ----

    async def _register_roots(self, node_id: str, groups: Sequence[tuple[bytes, list[ChunkRecord]]]) -> list[int]:
        """Chunks of several buckets, none of which has a parent in another one."""
        calls = [(bucket_keys(fingerprint(bucket)), self._registration(node_id, group)) for bucket, group in groups]
        return [each for marks in await self._all("register", calls) for each in _generations(marks)]

    def _registration(self, node_id: str, chunks: Sequence[ChunkRecord], elsewhere: bytes = b"") -> list[Any]:
        keys = _keys(chunks)
        prints, above = fingerprints(keys), fingerprints(b"".join(chunk.parent or bytes(KEY_BYTES) for chunk in chunks))
        packed = b"".join(
            prints[at : at + PRINT_BYTES] + (above[at : at + PRINT_BYTES] if chunk.parent else _NO_PARENT)
            for at, chunk in zip(range(0, len(prints), PRINT_BYTES), chunks, strict=True)
        )
        fresh = (int.from_bytes(self._draw(8), "big") | 1).to_bytes(8, "big")
        return [node_id, packed, fresh, elsewhere, keys if node_id == OBJECT_TIER else b""]

    async def _register_bucket(self, node_id: str, bucket: bytes, chunks: list[ChunkRecord], now_ms: int) -> list[int]:
        opener, counted = chunks[0], False
        crosses = bool(opener.parent) and opener.parent_bucket != opener.bucket
        parent, elsewhere = (fingerprint(opener.parent), fingerprint(opener.parent_bucket)) if crosses else (b"", b"")
        if crosses and not await self._exists(opener):
            # The parent lives in another bucket: count the child there first. A crash in between leaves the parent
            # held too long, never the chain open.
            counted = await self._count_child(parent, elsewhere, 1, now_ms)
            if not counted:
                return [0] * len(chunks)
        marks = await self._change("register", bucket, self._registration(node_id, chunks, elsewhere))
        if counted and marks[:1] != b"2":  # another one was quicker and counted as well, or it was refused
            await self._count_child(parent, elsewhere, -1, now_ms)
        return _generations(marks)

    async def _exists(self, chunk: ChunkRecord) -> bool:
        return bool(await self._run("exists", [bucket_key(fingerprint(chunk.bucket))], [fingerprint(chunk.key)]))

    async def _count_child(self, parent: bytes, bucket: bytes, change: int, now_ms: int, leases: bytes = b"") -> bool:
        mark, *orphaned = await self._change("count_child", bucket, [parent, change, now_ms, leases])
        await self._uncount(orphaned, now_ms)
        return bool(mark == b"1")

    async def _uncount(self, orphaned: Sequence[bytes], now_ms: int) -> None:
        """Parents in other buckets have lost a child: (parent, bucket, the child's leases), flat."""
        for parent, bucket, leases in zip(orphaned[::3], orphaned[1::3], orphaned[2::3], strict=True):
            await self._count_child(parent, bucket, -1, now_ms, leases)

    async def _match_buckets(self, prints: bytes, openers: Sequence[bytes]) -> list[Any]:
        step = BUCKET_CHUNKS * PRINT_BYTES
        parts = [prints[at : at + step] for at in range(0, len(prints), step)]
        calls: list[tuple[list[bytes], list[Any]]] = [
            ([bucket_key(opener)], [part, BUCKET_CHUNKS, 1]) for opener, part in zip(openers, parts, strict=True)
        ]
        flat: list[Any] = [0]
        for part, (extended, *runs) in zip(parts, await self._all("match", calls), strict=True):
            flat += runs
            flat[0] = extended if runs else flat[0]
            if sum(runs[::2]) * PRINT_BYTES < len(part):
                break
        return flat

    async def _change(self, name: str, bucket: bytes, arguments: list[Any]) -> Any:
        return await self._run(name, bucket_keys(bucket), arguments)

    async def _run(self, name: str, keys: list[bytes], arguments: list[Any]) -> Any:
        async with metadata_errors():
            return await self._scripts[name](keys=keys, args=arguments)

    async def _all(self, name: str, calls: Sequence[tuple[list[bytes], list[Any]]]) -> list[Any]:
        """A script for several sets of keys, in one pipeline."""
        if len(calls) == 1:
            return [await self._run(name, *calls[0])]
        async with metadata_errors():
            try:
                return await self._piped(name, calls)
            except NoScriptError:
                await self._client.script_load(self._scripts[name].script)
                return await self._piped(name, calls)

    async def _piped(self, name: str, calls: Sequence[tuple[list[bytes], list[Any]]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for keys, arguments in calls:
            pipeline.execute_command("EVALSHA", self._scripts[name].sha, len(keys), *keys, *arguments)
        return await pipeline.execute()


def _keys(chunks: Sequence[ChunkRecord]) -> bytes:
    return b"".join(chunk.key for chunk in chunks)


def _generations(marks: bytes) -> list[int]:
    return [int.from_bytes(marks[at + 1 : at + 9], "big") for at in range(0, len(marks), 9)]


def _drops_key(node_id: str) -> str:
    return f"quire:dropped:{node_id}"
