"""The prefix-closed index: which chunks exist, and which storage nodes hold them.

Closed means that a chunk is indexed only if the chunk before it is, so the longest cached prefix is found by
bisection: on the server, in one round trip, without reading every key. Chains are cut into segments of 256 chunks,
each a Redis hash named by the key that opens it, so that a popular root does not fill one slot of a Redis Cluster.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, cast

import redis.asyncio as redis
from redis.exceptions import NoScriptError

from quire.keys import KEY_BYTES, SEGMENT_CHUNKS, ChunkKeys
from quire.metadata import scripts
from quire.metadata.connection import metadata_errors

_NO_PARENT: Final = bytes(KEY_BYTES)
_ABSENT: Final = b"absent\0"
_KEPT: Final = b"kept\0"
_EPOCH_KEY: Final = "quire:epoch"
_DROPS_TTL_S: Final = 30 * 24 * 3600
OBJECT_TIER: Final = "@object"
"""Stands among the nodes of a placement for the object tier, which every storage node reads."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk's place in the index. `parent` and `parent_segment` are empty for the first of a prefix."""

    key: bytes
    parent: bytes
    segment: bytes
    parent_segment: bytes


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """`count` consecutive chunks that the same `nodes` hold; no nodes: indexed, but no replica is left."""

    count: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest indexed prefix, as runs from its start."""

    runs: tuple[PlacedRun, ...]

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)


@dataclass(frozen=True, slots=True)
class Evicted:
    """`removed`: (key, nodes that held it); `absent`: keys that were not indexed in the first place."""

    removed: tuple[tuple[bytes, tuple[str, ...]], ...]
    absent: tuple[bytes, ...]


def records(keys: ChunkKeys, first: int, count: int) -> list[ChunkRecord]:
    """Index records of chunks first … first+count-1 of a chain whose keys from the start are `keys`."""
    made = []
    for index in range(first, first + count):
        parent, parent_segment = (keys.at(index - 1), keys.segment_of(index - 1)) if index else (b"", b"")
        made.append(ChunkRecord(keys.at(index), parent, keys.segment_of(index), parent_segment))
    return made


class PrefixIndex:
    """The index behind one Redis. `cluster` asks segment by segment in a pipeline, else all in one call."""

    def __init__(self, client: redis.Redis, *, cluster: bool = False) -> None:
        self._client = client
        self._cluster = cluster
        names = {
            "match": scripts.MATCH,
            "register": scripts.REGISTER,
            "unregister": scripts.UNREGISTER,
            "evict": scripts.EVICT,
            "count_child": scripts.COUNT_CHILD,
            "pin": scripts.PIN,
        }
        self._scripts = {name: client.register_script(text) for name, text in names.items()}

    async def match(self, keys: ChunkKeys) -> Match:
        """The longest indexed prefix of `keys`; no side effect."""
        if len(keys) == 0:
            return Match(())
        segments = [_segment_key(keys.at(at)) for at in range(0, len(keys), SEGMENT_CHUNKS)]
        if self._cluster:
            flat = await self._match_each(keys, segments)
        else:
            flat = await self._run("match", segments, [keys.packed, SEGMENT_CHUNKS])
        runs: list[PlacedRun] = []
        for count, placement in zip(flat[::2], flat[1::2], strict=True):
            nodes = _nodes(placement)
            if runs and runs[-1].nodes == nodes:
                count += runs.pop().count
            runs.append(PlacedRun(count, nodes))
        return Match(tuple(runs))

    async def register(self, node_id: str, chunks: Sequence[ChunkRecord], *, only_indexed: bool = False) -> list[bool]:
        """List `node_id` as a holder of `chunks`, parents before children.

        False for a chunk whose parent is not indexed: indexing it would break the closure. `only_indexed`: False also
        for one that is not indexed itself.
        """
        indexed: list[bool] = []
        for segment, group in groupby(chunks, key=lambda chunk: chunk.segment):
            if only_indexed:
                arguments = [node_id, _pack(list(group)), "1"]
                mask = bytes(await self._run("register", [_segment_key(segment)], arguments))
                indexed += [mark != ord("0") for mark in mask]
            else:
                indexed += await self._register_segment(node_id, segment, list(group))
        return indexed

    async def unregister(self, node_id: str, chunks: Sequence[ChunkRecord]) -> int:
        """`node_id` holds these no more. They stay indexed, without replica if it was the last."""
        changed = 0
        for segment, group in groupby(chunks, key=lambda chunk: chunk.segment):
            packed = b"".join(chunk.key for chunk in group)
            changed += int(await self._run("unregister", [_segment_key(segment)], [node_id, packed]))
        return changed

    async def evict(self, chunks: Sequence[ChunkRecord], now_ms: int) -> Evicted:
        """Take chunks, children before parents, out of the index; those that others extend or leases pin stay."""
        removed: list[tuple[bytes, tuple[str, ...]]] = []
        absent: list[bytes] = []
        for segment, group in groupby(chunks, key=lambda chunk: chunk.segment):
            part = list(group)
            placements = await self._run("evict", [_segment_key(segment), _pins_key(segment)], [now_ms, _pack(part)])
            for chunk, placement in zip(part, placements, strict=True):
                if placement == _ABSENT:
                    absent.append(chunk.key)
                elif placement != _KEPT:
                    removed.append((chunk.key, _nodes(placement)))
                    if chunk.parent and chunk.key == segment:
                        await self._count_child(chunk, -1)
        return Evicted(tuple(removed), tuple(absent))

    async def holders(self, chunks: Sequence[ChunkRecord]) -> list[tuple[str, ...]]:
        """The nodes that hold each of `chunks`."""
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for chunk in chunks:
                pipeline.hget(_segment_key(chunk.segment), chunk.key)
            return [_nodes(placement or b"") for placement in await pipeline.execute()]

    async def epoch(self) -> str:
        """Random name of this index, given when it is first asked for: an index that was lost has another."""
        async with metadata_errors():
            await self._client.set(_EPOCH_KEY, os.urandom(8).hex(), nx=True)
            return str(cast(bytes, await self._client.get(_EPOCH_KEY)).decode())

    async def remember_drops(self, node_id: str, keys: Sequence[bytes]) -> None:
        """Chunks that were evicted while `node_id` could not be told."""
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.sadd(_drops_key(node_id), *keys)
            pipeline.expire(_drops_key(node_id), _DROPS_TTL_S)
            await pipeline.execute()

    async def take_drops(self, node_id: str) -> list[bytes]:
        """What `remember_drops` remembered, once."""
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.smembers(_drops_key(node_id))
            pipeline.delete(_drops_key(node_id))
            return list((await pipeline.execute())[0])

    async def pin(self, segment: bytes, key: bytes, lease_id: bytes, expires_ms: int, ttl_ms: int) -> bool:
        """Keep `key`, and with it all that it extends, until `expires_ms`. False if it is gone."""
        arguments = [key, lease_id, expires_ms, ttl_ms]
        return bool(await self._run("pin", [_segment_key(segment), _pins_key(segment)], arguments))

    async def unpin(self, segment: bytes, key: bytes, lease_id: bytes) -> bool:
        """Give a pin back; whether it was held."""
        async with metadata_errors():
            return bool(await self._client.hdel(_pins_key(segment), key + lease_id))

    async def pins(self, segment: bytes) -> int:
        """How many pins a segment has, expired ones included until the next eviction."""
        async with metadata_errors():
            return int(await self._client.hlen(_pins_key(segment)))

    async def _register_segment(self, node_id: str, segment: bytes, chunks: list[ChunkRecord]) -> list[bool]:
        opener = chunks[0]
        counted = False
        if opener.parent and opener.key == segment and not await self._exists(opener):
            # The parent lives in another segment: count the child there first. A crash in between leaves the parent
            # held too long, never the chain open.
            counted = await self._count_child(opener, 1)
            if not counted:
                return [False] * len(chunks)
        mask = bytes(await self._run("register", [_segment_key(segment)], [node_id, _pack(chunks), "0"]))
        if counted and mask[:1] == b"1":  # somebody else was quicker and counted as well
            await self._count_child(opener, -1)
        return [mark != ord("0") for mark in mask]

    async def _exists(self, chunk: ChunkRecord) -> bool:
        async with metadata_errors():
            return bool(await self._client.hexists(_segment_key(chunk.segment), chunk.key))

    async def _count_child(self, opener: ChunkRecord, change: int) -> bool:
        return bool(await self._run("count_child", [_segment_key(opener.parent_segment)], [opener.parent, change]))

    async def _match_each(self, keys: ChunkKeys, segments: list[str]) -> list[Any]:
        async with metadata_errors():
            try:
                return await self._match_pipeline(keys, segments)
            except NoScriptError:
                await self._client.script_load(scripts.MATCH)
                return await self._match_pipeline(keys, segments)

    async def _match_pipeline(self, keys: ChunkKeys, segments: list[str]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        sizes = []
        for at, segment in enumerate(segments):
            part = keys.run(at * SEGMENT_CHUNKS, min(SEGMENT_CHUNKS, len(keys) - at * SEGMENT_CHUNKS))
            sizes.append(len(part))
            pipeline.evalsha(self._scripts["match"].sha, 1, segment, part.packed, SEGMENT_CHUNKS)
        flat: list[Any] = []
        for size, runs in zip(sizes, await pipeline.execute(), strict=True):
            flat += runs
            if sum(runs[::2]) < size:
                break
        return flat

    async def _run(self, name: str, keys: list[str], arguments: list[Any]) -> Any:
        async with metadata_errors():
            return await self._scripts[name](keys=keys, args=arguments)


def _pack(chunks: Sequence[ChunkRecord]) -> bytes:
    """(digest ‖ parent) of each; a parent in another segment counts as none here."""
    return b"".join(
        chunk.key + (chunk.parent if chunk.parent_segment == chunk.segment else _NO_PARENT) for chunk in chunks
    )


def _segment_key(segment: bytes) -> str:
    return f"quire:index:{{{segment.hex()}}}"


def _pins_key(segment: bytes) -> str:
    return f"quire:pins:{{{segment.hex()}}}"


def _drops_key(node_id: str) -> str:
    return f"quire:drops:{node_id}"


def _nodes(placement: bytes) -> tuple[str, ...]:
    return tuple(placement.decode().split(",")) if placement else ()


__all__ = ["OBJECT_TIER", "ChunkRecord", "Evicted", "Match", "PlacedRun", "PrefixIndex", "records"]
