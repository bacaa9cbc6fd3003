"""Chunks in the order in which the scripts of the prefix index take them: bucket by bucket, packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from quire.model.fingerprints import PRINT_BYTES, fingerprints
from quire.model.index import OBJECT_TIER
from quire.model.keys import KEY_BYTES
from quire.model.records import ChunkRecord, ChunkRecords


class Bucketful(NamedTuple):
    """Chunks of one bucket, packed.

    Attributes:
        first: Number of the first of them in the request.
        size: How many they are.
        name: Fingerprint of the bucket.
        bucket: Key of the bucket.
        keys: Keys of the chunks.
        prints: Fingerprints of the chunks.
        is_linked: The first one has its parent in another bucket.
        has_links: Any of them has.
    """

    first: int
    size: int
    name: bytes
    bucket: bytes
    keys: bytes
    prints: bytes
    is_linked: bool
    has_links: bool


def bucketfuls(chunks: Sequence[ChunkRecord]) -> list[Bucketful]:
    """Cut chunks where the bucket changes."""
    records = ChunkRecords.of(chunks)
    prints, names, links = fingerprints(records.keys), fingerprints(records.buckets), records.has_link()
    keys, buckets, is_linked = records.keys, records.buckets, links.tolist()
    some_links = bool(links.any())
    return [
        Bucketful(
            first,
            stop - first,
            names[first * PRINT_BYTES : (first + 1) * PRINT_BYTES],
            buckets[first * KEY_BYTES : (first + 1) * KEY_BYTES],
            keys[first * KEY_BYTES : stop * KEY_BYTES],
            prints[first * PRINT_BYTES : stop * PRINT_BYTES],
            is_linked[first],
            some_links and any(is_linked[first:stop]),
        )
        for first, stop in records.runs(records.buckets)
    ]


def registrations(node_id: str, records: ChunkRecords, parts: Sequence[Bucketful]) -> list[tuple[bytes, list[Any]]]:
    """Return the fingerprint of each part's bucket, and the arguments of the registration of its chunks.

    `parts`: some of those that `records` have.
    """
    columns = (np.frombuffer(fingerprints(column), np.uint8) for column in (records.keys, records.parents))
    rows = np.stack([column.reshape(-1, PRINT_BYTES) for column in columns], axis=1).tobytes()
    calls = list[tuple[bytes, list[Any]]]()
    for part in parts:
        own = rows[2 * PRINT_BYTES * part.first : 2 * PRINT_BYTES * (part.first + part.size)]
        calls.append((part.name, [own, part.keys, part.bucket] if node_id == OBJECT_TIER else [own]))
    return calls


def independent(parts: Sequence[Bucketful]) -> Iterator[list[Bucketful]]:
    """Yield buckets in groups that one call may remove: a bucket with links to parents in others is a group alone.

    Its links have to be gone before these parents are looked at.
    """
    for has_links, run in groupby(parts, key=lambda part: part.has_links):
        if has_links:
            yield from ([part] for part in run)
        else:
            yield list(run)
