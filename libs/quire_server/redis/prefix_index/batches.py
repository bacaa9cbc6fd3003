"""Chunks in the order in which the scripts of the prefix index take them: bucket by bucket, packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from quire.model.fingerprints import PRINT_BYTES, fingerprints
from quire.model.index import OBJECT_TIER, ChunkRecord
from quire.model.keys import KEY_BYTES

_NO_KEY, _NO_PARENT = bytes(KEY_BYTES), bytes(PRINT_BYTES)


def packed_keys(chunks: Sequence[ChunkRecord]) -> bytes:
    """Return the keys of chunks, one behind the other."""
    return b"".join(chunk.key for chunk in chunks)


def registration(node_id: str, chunks: Sequence[ChunkRecord]) -> list[Any]:
    """Return the arguments of a registration in one bucket."""
    keys = packed_keys(chunks)
    prints, above = fingerprints(keys), fingerprints(b"".join(chunk.parent or _NO_KEY for chunk in chunks))
    packed = b"".join(
        prints[at : at + PRINT_BYTES] + (above[at : at + PRINT_BYTES] if chunk.parent else _NO_PARENT)
        for at, chunk in zip(range(0, len(prints), PRINT_BYTES), chunks, strict=True)
    )
    return [packed, keys, chunks[0].bucket] if node_id == OBJECT_TIER else [packed]


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
