"""The prefix-closed index: which chunks exist, and which storage nodes hold them.

Closed means that a chunk is indexed only if the chunk before it is, so the longest cached prefix is found by
bisection: on the server, in one round trip, without reading every key. Chains are cut into buckets of 256 chunks,
each a Redis hash named by the key that opens it, so that a popular root does not fill one slot of a Redis Cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, cast

import redis.asyncio as redis
from redis.exceptions import NoScriptError

from quire.model.index import OBJECT_TIER, ChunkRecord, Evicted, Gone, Listing, Match, ObjectMark, Pin, PlacedRun
from quire.model.keys import BUCKET_CHUNKS, KEY_BYTES, ChunkKeys
from quire_server.redis import scripts
from quire_server.redis.connection import metadata_errors

_NO_PARENT: Final = bytes(KEY_BYTES)
_EPOCH_KEY: Final = "quire:epoch"
_LISTINGS_KEY: Final = "quire:listings"
_CHANGES_KEY: Final = "quire:changes"
_DUE_KEY: Final = "quire:objects-due"
_REBUILD_KEY: Final = "quire:rebuild"
_SCANNED: Final = 64
_AT_ONCE: Final = 64
_HELD_AT_ONCE: Final = 4096
_PRUNE_MS: Final = 10_000
_DROPS_TTL_S: Final = 30 * 24 * 3600
_OBJECT_MARKS: Final = {ord("1"): ObjectMark.LISTED, ord("0"): ObjectMark.GONE, ord("!"): ObjectMark.DELETING}


class PrefixIndex:
    """The index behind one Redis. `cluster` asks bucket by bucket in a pipeline, else all in one call.

    `draw` makes the random bytes of generations.
    """

    def __init__(
        self, client: redis.Redis, *, cluster: bool = False, draw: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._draw = draw
        names = {
            "match": scripts.MATCH,
            "holders": scripts.HOLDERS,
            "register": scripts.REGISTER,
            "unregister": scripts.UNREGISTER,
            "evict": scripts.EVICT,
            "count_child": scripts.COUNT_CHILD,
            "add_objects": scripts.ADD_OBJECTS,
            "expect": scripts.EXPECT,
            "claim": scripts.CLAIM,
            "deleted": scripts.DELETED,
            "pin": scripts.PIN,
        }
        self._scripts = {name: client.register_script(text) for name, text in names.items()}

    async def match(self, keys: ChunkKeys, pin: Pin | None = None) -> Match:
        """The longest indexed prefix of `keys`. `pin`: its last chunk is kept from that very moment on."""
        if len(keys) == 0:
            return Match(())
        openers = [keys.at(at) for at in range(0, len(keys), BUCKET_CHUNKS)]
        if self._cluster:
            return await self._match_each(keys, openers, pin)
        names, arguments = [_bucket_key(each) for each in openers], [keys.packed, BUCKET_CHUNKS, len(openers)]
        if pin is not None:
            names += [_pins_key(each) for each in openers]
            arguments += _pin_arguments(pin)
        return _runs(await self._run("match", names, arguments))

    async def _match_each(self, keys: ChunkKeys, openers: list[bytes], pin: Pin | None) -> Match:
        """Bucket by bucket. What goes between the match and the pin is looked up again."""
        while True:
            match = _runs(await self._match_buckets(keys, [_bucket_key(each) for each in openers]))
            if pin is None or not match.count:
                return match
            tip = match.count - 1
            names = [_bucket_key(keys.bucket_of(tip)), _pins_key(keys.bucket_of(tip))]
            if await self._run("pin", names, [keys.at(tip), *_pin_arguments(pin)]):
                return match

    async def register(self, node_id: str, chunks: Sequence[ChunkRecord], now_ms: int) -> list[int]:
        """List `node_id` as a holder of `chunks`, parents before children; the generations of their entries.

        0 for a chunk whose parent is not indexed, because indexing it would break the closure, and for the object tier
        where the object is being deleted.
        """
        groups = [(bucket, list(group)) for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket)]
        generations: list[int] = []
        if not any(group[0].parent for _, group in groups):  # roots wait for nothing
            for at in range(0, len(groups), _AT_ONCE):
                generations += await self._register_roots(node_id, groups[at : at + _AT_ONCE])
            return generations
        for bucket, group in groups:
            generations += await self._register_bucket(node_id, bucket, group, now_ms)
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
            packed = b"".join(chunk.key for chunk in group)
            arguments = [node_id, packed, now_ms, "1" if only_in_object else "", others_min]
            mask, *orphaned = await self._change("unregister", bucket, arguments)
            out += [mark == ord("1") for mark in mask]
            await self._uncount(orphaned, now_ms)
        return out

    async def evict(self, chunks: Sequence[ChunkRecord], now_ms: int, delete_ms: int) -> Evicted:
        """Take chunks, children before parents, out of the index; those that others extend or leases pin stay.

        Objects of theirs are to be deleted at `delete_ms`, unless an entry lists them again by then.
        """
        removed: list[Gone] = []
        absent: list[bytes] = []
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            part = list(group)
            arguments = [now_ms, b"".join(chunk.key for chunk in part), delete_ms]
            count, *rest = await self._change("evict", bucket, arguments)
            for chunk, answer in zip(part, rest[count:], strict=True):
                if answer == b"absent":
                    absent.append(chunk.key)
                elif answer != b"kept":
                    removed.append(Gone(chunk, int.from_bytes(answer[:8], "big"), _nodes(answer[8:])))
            await self._uncount(rest[:count], now_ms)
        due = {gone.record.bucket + gone.record.key: delete_ms for gone in removed if OBJECT_TIER in gone.nodes}
        if due:
            async with metadata_errors():
                await self._client.zadd(_DUE_KEY, due)
        return Evicted(tuple(removed), tuple(absent))

    async def holders(self, chunks: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        """The nodes that hold each of `chunks`."""
        if not self._cluster:
            placements: list[bytes] = []
            for at in range(0, len(chunks), _HELD_AT_ONCE):
                part = chunks[at : at + _HELD_AT_ONCE]
                digests = b"".join(chunk.key for chunk in part)
                placements += await self._run("holders", [_bucket_key(chunk.bucket) for chunk in part], [digests])
            return [_nodes(placement) for placement in placements]
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for chunk in chunks:
                pipeline.hget(_bucket_key(chunk.bucket), chunk.key)
            return [_nodes(placement or b"") for placement in await pipeline.execute()]

    async def epoch(self) -> str:
        """Random name of this index, given when it is first asked for: an index that was lost has another.

        A new one does not know what lies in the object tier.
        """
        async with metadata_errors():
            if await self._client.set(_EPOCH_KEY, self._draw(8).hex(), nx=True):
                await self.damaged()
            return str(cast(bytes, await self._client.get(_EPOCH_KEY)).decode())

    # ---- what nodes are listed for

    async def listings(self) -> dict[str, Listing]:
        """For every node that was ever listed, how many chunks it is listed for, and their digest."""
        async with metadata_errors():
            found = cast(dict[bytes, bytes], await self._client.hgetall(_LISTINGS_KEY))
            changes = cast(dict[bytes, bytes], await self._client.hgetall(_CHANGES_KEY))
        listings = {}
        for name in found.keys() | changes.keys():
            count, _, digest = found.get(name, b"0:0").partition(b":")
            listings[name.decode()] = Listing(int(count), int(digest), int(changes.get(name, b"0")))
        return listings

    async def count_change(self, node_id: str) -> None:
        """A node has reported something. To be called when it is done, and before the node is answered."""
        async with metadata_errors():
            await self._client.hincrby(_CHANGES_KEY, node_id, 1)

    async def holdings(self, node_id: str, cursor: int) -> tuple[list[tuple[ChunkRecord, int]], int]:
        """A page of what is listed for a node: records (parents left empty), generations, and the next cursor, 0 at
        the end. A chunk that is listed all the while is in one page at least.
        """
        async with metadata_errors():
            after, names = await self._client.scan(cursor, match="quire:index:*", count=_SCANNED)
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.hgetall(name)
            found: list[tuple[ChunkRecord, int]] = []
            for name, fields in zip(names, await pipeline.execute(), strict=True):
                bucket = bytes.fromhex(cast(bytes, name).decode().partition("{")[2][:-1])
                for key, placement in fields.items():
                    if len(key) == KEY_BYTES and node_id in _nodes(placement):
                        generation = int.from_bytes(fields.get(key + b"g", b"")[:8], "big")
                        found.append((ChunkRecord(key, b"", bucket, b""), generation))
            return found, int(after)

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
            part = list(group)
            packed = b"".join(each.to_bytes(8, "big") for _, each in part)
            mask = await self._change("add_objects", bucket, [b"".join(chunk.key for chunk, _ in part), packed])
            marks += [_OBJECT_MARKS[mark] for mark in mask]
            listed = [bucket + chunk.key for (chunk, _), mark in zip(part, mask, strict=True) if mark == ord("1")]
            if listed:
                async with metadata_errors():
                    await self._client.zrem(_DUE_KEY, *listed)
        return marks

    async def expect_objects(self, chunks: Sequence[ChunkRecord], delete_ms: int) -> list[bool]:
        """Objects that are about to be written, or that no entry lists: to be deleted at `delete_ms` or later, unless
        one lists them by then. False for one that is being deleted just now.
        """
        marks: list[bool] = []
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            part = list(group)
            mask = await self._change("expect", bucket, [b"".join(chunk.key for chunk in part), delete_ms])
            noted = [bucket + chunk.key for chunk, mark in zip(part, mask, strict=True) if mark == ord("1")]
            if noted:
                async with metadata_errors():
                    await self._client.zadd(_DUE_KEY, dict.fromkeys(noted, delete_ms))
            marks += [mark != ord("!") for mark in mask]
        return marks

    async def claim_objects(self, now_ms: int, until_ms: int, limit: int) -> list[ChunkRecord]:
        """Objects whose time has come: to be deleted by the caller, who has until `until_ms`. Until then, or until
        `objects_deleted` says so, no entry lists them.
        """
        async with metadata_errors():
            due = cast(list[bytes], await self._client.zrangebyscore(_DUE_KEY, 0, now_ms, 0, limit))
        chunks = [ChunkRecord(each[KEY_BYTES:], b"", each[:KEY_BYTES], b"") for each in due]
        claimed: list[ChunkRecord] = []
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            part = list(group)
            arguments = [b"".join(chunk.key for chunk in part), now_ms, until_ms]
            mask = await self._change("claim", bucket, arguments)
            claimed += [chunk for chunk, mark in zip(part, mask, strict=True) if mark == ord("1")]
            over = [bucket + chunk.key for chunk, mark in zip(part, mask, strict=True) if mark == ord("0")]
            later = {bucket + chunk.key: until_ms for chunk, mark in zip(part, mask, strict=True) if mark != ord("0")}
            async with metadata_errors():
                if over:
                    await self._client.zrem(_DUE_KEY, *over)
                if later:
                    await self._client.zadd(_DUE_KEY, later)
        return claimed

    async def objects_deleted(self, chunks: Sequence[ChunkRecord], until_ms: int) -> None:
        """What was claimed until then is deleted."""
        for bucket, group in groupby(chunks, key=lambda chunk: chunk.bucket):
            part = list(group)
            await self._change("deleted", bucket, [b"".join(chunk.key for chunk in part), until_ms])
            async with metadata_errors():
                await self._client.zrem(_DUE_KEY, *(bucket + chunk.key for chunk in part))

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
            return bool(await self._client.hdel(_pins_key(bucket), key + lease_id))

    async def unpin_all(self, keys: ChunkKeys, lease_id: bytes) -> int:
        """Give back what pins of this id are on any of the keys; how many were held."""
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for at in range(0, len(keys), BUCKET_CHUNKS):
                part = keys.run(at, min(BUCKET_CHUNKS, len(keys) - at))
                pipeline.hdel(_pins_key(keys.bucket_of(at)), *(key + lease_id for key in part))
            return sum(await pipeline.execute())

    async def pins(self, bucket: bytes) -> int:
        """How many pins a bucket has; expired ones count for ten seconds more."""
        async with metadata_errors():
            return len([name for name in await self._client.hkeys(_pins_key(bucket)) if len(name) > KEY_BYTES])

    # ----

    async def _register_roots(self, node_id: str, groups: Sequence[tuple[bytes, list[ChunkRecord]]]) -> list[int]:
        """Chunks of several buckets, none of which has a parent in another one."""
        if len(groups) == 1:
            return _generations(await self._change("register", groups[0][0], self._registration(node_id, groups[0][1])))
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for bucket, group in groups:
                keys, arguments = _bucket_keys(bucket), self._registration(node_id, group)
                await self._scripts["register"](keys=keys, args=arguments, client=pipeline)
            return [each for marks in await pipeline.execute() for each in _generations(marks)]

    def _registration(self, node_id: str, chunks: Sequence[ChunkRecord], elsewhere: bytes = b"") -> list[Any]:
        packed = b"".join(chunk.key + (chunk.parent or _NO_PARENT) for chunk in chunks)
        fresh = (int.from_bytes(self._draw(8), "big") | 1).to_bytes(8, "big")
        return [node_id, packed, fresh, elsewhere]

    async def _register_bucket(self, node_id: str, bucket: bytes, chunks: list[ChunkRecord], now_ms: int) -> list[int]:
        opener, counted = chunks[0], False
        crosses = bool(opener.parent) and opener.parent_bucket != bucket
        if crosses and not await self._exists(opener):
            # The parent lives in another bucket: count the child there first. A crash in between leaves the parent
            # held too long, never the chain open.
            counted = await self._count_child(opener.parent, opener.parent_bucket, 1, now_ms)
            if not counted:
                return [0] * len(chunks)
        elsewhere = opener.parent_bucket if crosses else b""
        marks = await self._change("register", bucket, self._registration(node_id, chunks, elsewhere))
        if counted and marks[:1] != b"2":  # another one was quicker and counted as well, or it was refused
            await self._count_child(opener.parent, opener.parent_bucket, -1, now_ms)
        return _generations(marks)

    async def _exists(self, chunk: ChunkRecord) -> bool:
        async with metadata_errors():
            return bool(await self._client.hexists(_bucket_key(chunk.bucket), chunk.key))

    async def _count_child(self, parent: bytes, bucket: bytes, change: int, now_ms: int, leases: bytes = b"") -> bool:
        mark, *orphaned = await self._change("count_child", bucket, [parent, change, now_ms, leases])
        await self._uncount(orphaned, now_ms)
        return bool(mark == b"1")

    async def _uncount(self, orphaned: Sequence[bytes], now_ms: int) -> None:
        """Parents in other buckets have lost a child: (parent, bucket, the child's leases), flat."""
        for parent, bucket, leases in zip(orphaned[::3], orphaned[1::3], orphaned[2::3], strict=True):
            await self._count_child(parent, bucket, -1, now_ms, leases)

    async def _match_buckets(self, keys: ChunkKeys, buckets: list[str]) -> list[Any]:
        async with metadata_errors():
            try:
                return await self._match_pipeline(keys, buckets)
            except NoScriptError:
                await self._client.script_load(scripts.MATCH)
                return await self._match_pipeline(keys, buckets)

    async def _match_pipeline(self, keys: ChunkKeys, buckets: list[str]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        sizes = []
        for at, bucket in enumerate(buckets):
            part = keys.run(at * BUCKET_CHUNKS, min(BUCKET_CHUNKS, len(keys) - at * BUCKET_CHUNKS))
            sizes.append(len(part))
            pipeline.evalsha(self._scripts["match"].sha, 1, bucket, part.packed, BUCKET_CHUNKS, 1)
        flat: list[Any] = []
        for size, runs in zip(sizes, await pipeline.execute(), strict=True):
            flat += runs
            if sum(runs[::2]) < size:
                break
        return flat

    async def _change(self, name: str, bucket: bytes, arguments: list[Any]) -> Any:
        return await self._run(name, _bucket_keys(bucket), arguments)

    async def _run(self, name: str, keys: list[str], arguments: list[Any]) -> Any:
        async with metadata_errors():
            return await self._scripts[name](keys=keys, args=arguments)


def _runs(flat: Sequence[Any]) -> Match:
    """What the script returns, neighbours of one placement together."""
    runs: list[PlacedRun] = []
    for count, placement in zip(flat[::2], flat[1::2], strict=True):
        nodes = _nodes(placement)
        if runs and runs[-1].nodes == nodes:
            count += runs.pop().count
        runs.append(PlacedRun(count, nodes))
    return Match(tuple(runs))


def _generations(marks: bytes) -> list[int]:
    return [int.from_bytes(marks[at + 1 : at + 9], "big") for at in range(0, len(marks), 9)]


def _bucket_keys(bucket: bytes) -> list[str]:
    """Of the scripts that change a bucket."""
    return [_bucket_key(bucket), _pins_key(bucket), _objects_key(bucket), _LISTINGS_KEY]


def _pin_arguments(pin: Pin) -> list[Any]:
    return [pin.lease_id, pin.expires_ms, pin.ttl_ms, pin.now_ms, pin.now_ms + _PRUNE_MS]


def _bucket_key(bucket: bytes) -> str:
    return f"quire:index:{{{bucket.hex()}}}"


def _pins_key(bucket: bytes) -> str:
    return f"quire:pins:{{{bucket.hex()}}}"


def _objects_key(bucket: bytes) -> str:
    return f"quire:objects:{{{bucket.hex()}}}"


def _drops_key(node_id: str) -> str:
    return f"quire:dropped:{node_id}"


def _nodes(placement: bytes) -> tuple[str, ...]:
    return tuple(placement.decode().split(",")) if placement else ()
