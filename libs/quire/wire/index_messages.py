"""Between messages and what the prefix index says of a node's chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.model.errors import InvalidRequest
from quire.model.fingerprints import PRINT_BYTES
from quire.model.index import Drop, Held
from quire.model.keys import KEY_BYTES
from quire.wire.v1 import orchestrator_pb2


def drops_to(drops: Iterable[Drop]) -> list[orchestrator_pb2.Drop]:
    return [orchestrator_pb2.Drop(chunk_key=drop.key, bucket=drop.bucket, generation=drop.generation) for drop in drops]


def drops_from(messages: Iterable[orchestrator_pb2.Drop]) -> list[Drop]:
    """Convert drops from the wire. Raises `InvalidRequest` for keys or buckets of other lengths."""
    drops = [Drop(message.chunk_key, message.bucket, message.generation) for message in messages]
    if any(len(drop.key) != KEY_BYTES or len(drop.bucket) != PRINT_BYTES for drop in drops):
        raise InvalidRequest("a drop has a key of 32 bytes and a bucket of 8", field="drops")
    return drops


def held_from(fingerprints: bytes, buckets: bytes, generations: Sequence[int]) -> list[Held]:
    """Convert listings from the wire. Raises `InvalidRequest` if their counts differ."""
    if len(fingerprints) != len(buckets) or len(fingerprints) != PRINT_BYTES * len(generations):
        raise InvalidRequest(f"{len(fingerprints)} and {len(buckets)} bytes of fingerprints", field="fingerprints")
    offsets = range(0, len(fingerprints), PRINT_BYTES)
    return [
        Held(fingerprints[at : at + PRINT_BYTES], buckets[at : at + PRINT_BYTES], generation)
        for at, generation in zip(offsets, generations, strict=True)
    ]
