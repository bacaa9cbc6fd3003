"""Chunks in the order in which the scripts of the prefix index take them: bucket by bucket, packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Final

import numpy as np

from quire.model.fingerprints import PRINT_BYTES, fingerprints
from quire.model.index import OBJECT_TIER, ChunkRecord
from quire.model.keys import KEY_BYTES

_NO_KEY: Final = bytes(KEY_BYTES)
"""In place of a parent's key; its fingerprint, zeros, says that there is none."""


@dataclass(frozen=True, slots=True)
class Bucketful:
    """Chunks of one bucket: the bucket's fingerprint and key, the keys of the chunks and their fingerprints, packed."""

    name: bytes
    bucket: bytes
    keys: bytes
    prints: bytes


def packed_keys(chunks: Sequence[ChunkRecord]) -> bytes:
    """Return the keys of chunks, one behind the other."""
    return b"".join(chunk.key for chunk in chunks)


def bucketfuls(groups: Sequence[Sequence[ChunkRecord]]) -> list[Bucketful]:
    """Return each group of chunks of one bucket, packed: the fingerprints of all of them are taken at once."""
    keys, buckets = packed_keys(list(chain.from_iterable(groups))), b"".join(group[0].bucket for group in groups)
    prints, names = fingerprints(keys), fingerprints(buckets)
    packed, at = list[Bucketful](), 0
    for number, group in enumerate(groups):
        stop, name = at + len(group), number * PRINT_BYTES
        packed.append(
            Bucketful(
                names[name : name + PRINT_BYTES],
                group[0].bucket,
                keys[at * KEY_BYTES : stop * KEY_BYTES],
                prints[at * PRINT_BYTES : stop * PRINT_BYTES],
            )
        )
        at = stop
    return packed


def registrations(node_id: str, groups: Sequence[Sequence[ChunkRecord]]) -> list[tuple[bytes, list[Any]]]:
    """Return the fingerprint of each group's bucket, and the arguments of the registration of its chunks."""
    packed = bucketfuls(groups)
    chunks = chain.from_iterable(groups)
    parents = np.frombuffer(fingerprints(b"".join(chunk.parent or _NO_KEY for chunk in chunks)), np.uint8)
    prints = np.frombuffer(b"".join(part.prints for part in packed), np.uint8)
    rows = np.stack([prints.reshape(-1, PRINT_BYTES), parents.reshape(-1, PRINT_BYTES)], axis=1).tobytes()
    calls, at = list[tuple[bytes, list[Any]]](), 0
    for part in packed:
        stop = at + 2 * len(part.prints)
        own = [rows[at:stop], part.keys, part.bucket] if node_id == OBJECT_TIER else [rows[at:stop]]
        calls.append((part.name, own))
        at = stop
    return calls


def by_bucket(chunks: Sequence[ChunkRecord]) -> list[list[ChunkRecord]]:
    """Cut chunks where the bucket changes."""
    return [list(group) for _, group in groupby(chunks, key=lambda chunk: chunk.bucket)]


def has_link(chunk: ChunkRecord) -> bool:
    """Return whether a chunk has its parent in another bucket."""
    return bool(chunk.parent) and chunk.parent_bucket != chunk.bucket


def independent(groups: Sequence[list[ChunkRecord]]) -> Iterator[list[list[ChunkRecord]]]:
    """Yield groups in parts that one call may remove: a bucket with links to parents in other buckets is a part alone.

    Its links have to be gone before these parents are looked at.
    """
    for is_linked, run in groupby(groups, key=lambda group: any(map(has_link, group))):
        if is_linked:
            yield from ([group] for group in run)
        else:
            yield list(run)
