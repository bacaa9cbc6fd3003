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
        pairs: Fingerprint of each chunk and of its parent, zeros for none.
        first_is_linked: The first one has its parent in another bucket.
        any_is_linked: Any of them has.
    """

    first: int
    size: int
    name: bytes
    bucket: bytes
    keys: bytes
    prints: bytes
    pairs: bytes
    first_is_linked: bool
    any_is_linked: bool


def bucketfuls(chunks: Sequence[ChunkRecord]) -> list[Bucketful]:
    """Cut chunks where the bucket changes."""
    records = ChunkRecords.of(chunks)
    keys, buckets, links = records.keys, records.buckets, records.link_mask()
    prints, names = fingerprints(keys), fingerprints(buckets)
    columns = np.frombuffer(prints, np.uint64), np.frombuffer(fingerprints(records.parents), np.uint64)
    pairs, is_linked, some_links = np.stack(columns, axis=1).tobytes(), links.tolist(), bool(links.any())
    return [
        Bucketful(
            first,
            stop - first,
            names[first * PRINT_BYTES : (first + 1) * PRINT_BYTES],
            buckets[first * KEY_BYTES : (first + 1) * KEY_BYTES],
            keys[first * KEY_BYTES : stop * KEY_BYTES],
            prints[first * PRINT_BYTES : stop * PRINT_BYTES],
            pairs[2 * first * PRINT_BYTES : 2 * stop * PRINT_BYTES],
            is_linked[first],
            some_links and any(is_linked[first:stop]),
        )
        for first, stop in records.runs(records.buckets)
    ]


def registrations(node_id: str, parts: Sequence[Bucketful]) -> list[tuple[bytes, list[Any]]]:
    """Return the fingerprint of each bucket, and the arguments of the registration of its chunks."""
    has_keys = node_id == OBJECT_TIER
    return [(part.name, [part.pairs, part.keys, part.bucket] if has_keys else [part.pairs]) for part in parts]


def independent(parts: Sequence[Bucketful]) -> Iterator[list[Bucketful]]:
    """Yield buckets in groups that one call may remove: a bucket with links to parents in others is a group alone.

    Its links have to be gone before these parents are looked at.
    """
    for has_links, run in groupby(parts, key=lambda part: part.any_is_linked):
        if has_links:
            yield from ([part] for part in run)
        else:
            yield list(run)
