"""What the scheduler's half keeps of a request of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from quire.integrations.vllm.contents import Contents
from quire.integrations.vllm.groups import Group
from quire.integrations.vllm.lookups import Found
from quire.model.hashing import Namespace, engine_keys
from quire.model.keys import ChunkKeys

Spaces = Sequence[Sequence[Namespace]]
"""Namespaces by group, and of each by shard."""


@dataclass(slots=True)
class Part:
    """Of a request in one group of layers. Everything is counted in the group's blocks.

    `found`: what Quire has, until a load or nobody has its leases. `stored`: blocks from the start that Quire
    has; the first `looked_up` of these it had when it was asked, this engine has stored the others. `storable`: whether
    that is known; behind chunks that may be missing nothing can be stored. `load_first`: the first block of the last
    load. Of states each stands for itself: `states` has the blocks at whose ends Quire has one.
    """

    found: Found | None = None
    states: set[int] = field(default_factory=set)
    stored: int = 0
    looked_up: int = 0
    storable: bool = False
    load_first: int = 0
    keys: list[tuple[bytes, ...]] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """Of a request.

    `naming`: of its contents, which have names once it ends: `contents`. `asking`: the look-ups, by part and shard.
    `answered`: whether it is known what Quire has. `promised`: tokens that vLLM had, and that it was promised.
    `store_tokens`: how many of its tokens may be stored, None for all.
    """

    request: Any
    parts: tuple[Part, ...]
    naming: Future[Contents] | None = None
    contents: Contents | None = None
    asking: Future[tuple[Found, ...]] | None = None
    asked_s: float = 0.0
    answered: bool = False
    promised: tuple[int, int] = (0, 0)
    preemptions: int = 0
    store_tokens: int | None = None

    @property
    def is_found(self) -> bool:
        """Whether the request holds leases of what Quire has."""
        return any(part.found is not None for part in self.parts)

    def nothing_stored(self, *, storable: bool) -> None:
        """Go on as if Quire had nothing of it."""
        self.answered = True
        for part in self.parts:
            part.stored, part.storable = 0, storable
            part.states.clear()

    def storable_tokens(self, computed: int, *, with_output: bool) -> int:
        """Return how many of its computed tokens may be stored."""
        if not with_output:
            computed = min(computed, self.request.num_prompt_tokens)
        return computed if self.store_tokens is None else min(computed, self.store_tokens)

    def blocks_max(self, group: Group, hash_tokens: int) -> int:
        """Return how many of its blocks have names, and hashes."""
        if self.contents is None:
            return 0
        hashed = len(self.request.block_hashes) // (group.block_tokens // hash_tokens)
        return min(hashed, self.contents.blocks_max(self.request, group.block_tokens))

    def spaces(self, spaces: Spaces, group: Group) -> tuple[Namespace, ...]:
        """Return the namespace of each shard: an adapter has its own."""
        adapter = self.contents.adapter if self.contents is not None else ""
        return tuple(replace(space, adapter=adapter) if adapter else space for space in spaces[group.number])

    def keys(self, spaces: Spaces, group: Group, hash_tokens: int, count: int) -> tuple[ChunkKeys, ...]:
        """Return the keys of the first `count` blocks, for each shard."""
        known, per_block = self.parts[group.number].keys, group.block_tokens // hash_tokens
        if count > len(known):
            assert self.contents is not None, "named by now"
            ends = self.request.block_hashes[(len(known) + 1) * per_block - 1 : count * per_block : per_block]
            fresh = self.contents.fold([bytes(end) for end in ends], len(known), group.block_tokens)
            own = ChunkKeys(b"".join(fresh))
            known += zip(*(engine_keys(space, own) for space in self.spaces(spaces, group)), strict=True)
        shards = len(spaces[group.number])
        return tuple(ChunkKeys(b"".join(keys[shard] for keys in known[:count])) for shard in range(shards))
