"""Values of the prefix index: placements, and results of its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from quire.model.records import ChunkRecord

OBJECT_TIER: Final = "@object"
"""Stands among the nodes of a placement for the object tier, which every storage node reads."""


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """`count` consecutive chunks that the same `nodes` hold; no nodes: indexed, but no replica is left."""

    count: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest indexed prefix, as runs from its start.

    `extended`: an indexed chunk extends the last one of them, the one that was asked for or another one.
    `wanted_bucket`: of a sample of keys, the bucket in which the prefix ends, where the sample does not say at which
    chunk; the runs end before it, and nothing is pinned.
    """

    runs: tuple[PlacedRun, ...]
    extended: bool = False
    wanted_bucket: int | None = None

    @property
    def count(self) -> int:
        """Number of chunks."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The pin of a look-up on its last chunk: a lease, until `expires_ms`. Redis forgets it after `ttl_ms`."""

    lease_id: bytes
    expires_ms: int
    ttl_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A chunk that was taken out: the generation of its entry, and the nodes that were listed."""

    record: ChunkRecord
    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """An entry of the index for a node: a chunk and its bucket by their fingerprints, and the entry's generation."""

    fingerprint: bytes
    bucket: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class Drop:
    """An order to a node to drop its copy of a chunk, decided on the index entry of one generation, which has ended.

    `bucket`: fingerprint of the chunk's index bucket.
    """

    key: bytes
    bucket: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """`removed`: entries that were removed; `absent`: keys that were not indexed in the first place.

    `hidden`: copies of either which their nodes cannot read now, and do not list: the entries that listed them.
    """

    removed: tuple[Gone, ...]
    absent: tuple[bytes, ...]
    hidden: tuple[Gone, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """How many chunks are listed for a node, and the sum of their `listing_number` modulo 2^48.

    `changes`: how many the node has reported. An index that has fewer than the node had answers lost its latest
    seconds, even where nothing that is listed for the node differs.
    """

    count: int = 0
    digest: int = 0
    changes: int = 0


DIGEST_MODULUS: Final = 1 << 48


def listing_number(print_: bytes, generation: int) -> int:
    """Return the number of a listed chunk: the first six bytes of its fingerprint and generation, added.

    With the generation, so that an index that went back to an earlier entry of the key differs from what nodes know.
    """
    return int.from_bytes(print_[:6], "big") + (generation >> 16)


def listing_total(prints: bytes, generations: Sequence[int]) -> int:
    """Return the sum of `listing_number` over chunks, modulo `DIGEST_MODULUS`. `prints`: packed fingerprints."""
    numbers = np.frombuffer(prints, dtype=">u8") >> np.uint64(16)
    return (int(numbers.sum(dtype=np.uint64)) + sum(generation >> 16 for generation in generations)) % DIGEST_MODULUS


class ObjectMark(Enum):
    """Whether an entry lists the object tier now; GONE: there is no such entry; DELETING: the object is going."""

    LISTED = 1
    GONE = 2
    DELETING = 3
