"""Chunks whose store is running, apart from the index: only a look-up that follows stores reads them.

Of each range of a store that a node takes there is one field, named by its first chunk, in a hash of the chunk's index
bucket. It ends with the store, or when the store's permit does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import redis.asyncio as redis

from quire.model.fingerprints import PRINT_BYTES, fingerprints
from quire.model.keys import BUCKET_CHUNKS, ChunkKeys
from quire.model.ranges import ChunkRange
from quire_server.redis.connection import metadata_errors
from quire_server.redis.prefix_index.slots import stores_key
from quire_server.redis.scripts import script

_HEAD: Final = struct.Struct(">16sQB")
_KEPT_MS: Final = 3_600_000
"""A hash to which nothing is added any more: longer than any permit."""


class RunningStores:
    """The stores that are running, by the chunks that they bring."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._end = client.register_script(script("index_stored"))

    async def begin(self, keys: ChunkKeys, ranges: Sequence[ChunkRange], store_id: bytes, until_ms: int) -> None:
        """Announce that chunks are on their way to nodes.

        Args:
            keys: Of the prefix, from its start.
            ranges: Chunks that nodes take.
            store_id: 16 bytes.
            until_ms: End of the store at the latest, Unix epoch.
        """
        prints = fingerprints(keys.packed)
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for part in _in_buckets(ranges):
                packed = prints[part.first * PRINT_BYTES : part.stop * PRINT_BYTES]
                node = part.node_id.encode()
                value = _HEAD.pack(store_id, until_ms, len(node)) + node + packed
                name = _bucket(prints, part)
                pipeline.hset(name, mapping={packed[:PRINT_BYTES]: value})
                pipeline.pexpire(name, _KEPT_MS)
            await pipeline.execute()

    async def end(self, keys: ChunkKeys, ranges: Sequence[ChunkRange], store_id: bytes) -> None:
        """Withdraw the announcement of `begin`, unless another store has announced the same chunks since."""
        prints = fingerprints(keys.packed)
        async with metadata_errors():
            for bucket, parts in groupby(_in_buckets(ranges), key=lambda part: _bucket(prints, part)):
                fields = [prints[part.first * PRINT_BYTES :][:PRINT_BYTES] for part in parts]
                await self._end(keys=[bucket], args=[store_id, *fields])

    async def find(self, keys: ChunkKeys, now_ms: int) -> list[ChunkRange]:
        """Return the parts of a prefix whose stores are running, the latest end first; some may overlap."""
        prints, step = fingerprints(keys.packed), BUCKET_CHUNKS * PRINT_BYTES
        buckets = [prints[at : at + step] for at in range(0, len(prints), step)]
        async with metadata_errors():
            pipeline = self._client.pipeline(transaction=False)
            for part in buckets:
                pipeline.hmget(stores_key(part[:PRINT_BYTES]), [*_each(part)])
            answers = await pipeline.execute()
        parts: list[tuple[int, ChunkRange]] = []
        for number, (part, values) in enumerate(zip(buckets, answers, strict=True)):
            for at, value in enumerate(values):
                if value is not None:
                    until_ms, node, count = _common(value, part[at * PRINT_BYTES :])
                    if until_ms > now_ms:
                        parts.append((until_ms, ChunkRange(node, number * BUCKET_CHUNKS + at, count)))
        return [run for _, run in sorted(parts, key=lambda entry: -entry[0])]


def _in_buckets(ranges: Sequence[ChunkRange]) -> Iterator[ChunkRange]:
    """Yield ranges cut where index buckets end."""
    for run in ranges:
        at = run.first
        while at < run.stop:
            stop = min(run.stop, (at // BUCKET_CHUNKS + 1) * BUCKET_CHUNKS)
            yield ChunkRange(run.node_id, at, stop - at)
            at = stop


def _bucket(prints: bytes, part: ChunkRange) -> bytes:
    opener = part.first // BUCKET_CHUNKS * BUCKET_CHUNKS * PRINT_BYTES
    return stores_key(prints[opener : opener + PRINT_BYTES])


def _each(prints: bytes) -> Iterator[bytes]:
    return (prints[at : at + PRINT_BYTES] for at in range(0, len(prints), PRINT_BYTES))


def _common(value: bytes, prints: bytes) -> tuple[int, str, int]:
    """Return the end of a field's store, its node, and how many chunks it has in common with a prefix."""
    _, until_ms, length = _HEAD.unpack_from(value)
    node, stored = value[_HEAD.size : _HEAD.size + length].decode(), value[_HEAD.size + length :]
    count = 0
    for ours, theirs in zip(_each(prints), _each(stored), strict=False):
        if ours != theirs:
            break
        count += 1
    return until_ms, node, count
