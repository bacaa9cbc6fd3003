"""State that the scheduler's half keeps for a request of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from quire.integrations.hints import Hints
from quire.integrations.vllm.contents import ContentNames, ModelContents
from quire.integrations.vllm.groups import Group
from quire.integrations.vllm.scheduler.handover import Handover
from quire.integrations.vllm.scheduler.lookups import RequestMatch
from quire.model.hashing import Namespace, engine_keys
from quire.model.keys import KEYS_MAX, ChunkKeys

Spaces = Sequence[Sequence[Namespace]]
"""Namespaces by group, and of each by shard."""


@dataclass(slots=True)
class RequestPart:
    """State of a request in one group of layers, counted in the group's blocks.

    Args:
        match: Leases that no load has taken over.
        stored: Blocks from the start of the request that Quire has.
        looked_up: Blocks from the start that the look-up found; this engine has stored the others.
        storable: Whether further blocks can be stored: never behind chunks that may be missing.
        load_first: First block of the last load.
        states: Blocks at whose ends Quire has a state.
        keys: Keys of blocks from the start, by shard.
    """

    match: RequestMatch | None = None
    states: set[int] = field(default_factory=set)
    stored: int = 0
    looked_up: int = 0
    storable: bool = False
    load_first: int = 0
    keys: list[tuple[bytes, ...]] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """State of a request.

    Args:
        request: vLLM's request.
        parts: State in each group.
        naming: Digests the contents while it runs.
        contents: Names of the contents; None before they are known, and without names.
        asking: Runs the look-ups.
        asked_s: Time at which the look-ups began, or the naming.
        answered: Whether the look-ups have ended, in whatever way.
        promised: Tokens that vLLM had, and tokens behind these that it may load.
        preemptions: Preemptions of the request that the look-ups take into account.
        store_tokens: Tokens from the start that may be stored; None for all.
        handover: What another engine has computed; None for nothing.
        awaited: Whether blocks of the hand-over may still come.
        following: Whether a load of this request follows the stores of the hand-over.
        hints: Of the application.
    """

    request: Any
    parts: tuple[RequestPart, ...]
    naming: Future[ModelContents] | None = None
    contents: ModelContents | None = None
    asking: Future[tuple[RequestMatch, ...]] | None = None
    asked_s: float = 0.0
    answered: bool = False
    promised: tuple[int, int] = (0, 0)
    preemptions: int = 0
    store_tokens: int | None = None
    handover: Handover | None = None
    awaited: bool = False
    following: bool = False
    hints: Hints = field(default_factory=Hints)

    @property
    def trace(self) -> Mapping[str, str]:
        """Headers that name the request's trace; none where vLLM records no traces."""
        headers: Mapping[str, str] | None = getattr(self.request, "trace_headers", None)
        return dict(headers) if headers else {}

    @property
    def is_leased(self) -> bool:
        """Whether the request holds leases on stored blocks."""
        return any(part.match is not None for part in self.parts)

    def nothing_stored(self, *, storable: bool) -> None:
        """Treat the request as one of which Quire has no block."""
        self.answered = True
        for part in self.parts:
            part.stored, part.storable = 0, storable
            part.states.clear()

    def storable_tokens(self, computed: int, *, with_output: bool) -> int:
        """Return the number of the request's computed tokens that may be stored."""
        if not with_output:
            computed = min(computed, self.request.num_prompt_tokens)
        return computed if self.store_tokens is None else min(computed, self.store_tokens)


class BlockNames:
    """Names the blocks of requests.

    Args:
        groups: Groups of the model's layers.
        hash_tokens: Tokens in each of vLLM's hashes.
        contents: Names contents that vLLM's hashes do not.
    """

    def __init__(self, groups: Sequence[Group], hash_tokens: int, contents: ContentNames) -> None:
        self.groups = tuple(groups)
        self.hash_tokens = hash_tokens
        self.namespaces: Spaces = ()
        """Empty before the workers have described their blocks."""
        self._contents = contents

    def is_current(self, state: State) -> bool:
        """Return whether the engine computes a request with the contents of its names."""
        return state.contents is not None and self._contents.is_current(state.request, state.contents)

    def count(self, state: State, group: Group) -> int:
        """Return the number of a request's blocks that have names and hashes, and fit one look-up."""
        if state.contents is None:
            return 0
        hashed = len(state.request.block_hashes) // (group.block_tokens // self.hash_tokens)
        return min(hashed, state.contents.blocks_max(state.request, group.block_tokens), KEYS_MAX)

    def spaces(self, state: State, group: Group) -> tuple[Namespace, ...]:
        """Return the namespace of each shard: an adapter has its own."""
        adapter = state.contents.adapter if state.contents is not None else ""
        spaces = self.namespaces[group.number]
        return tuple(replace(space, adapter=adapter) if adapter else space for space in spaces)

    def keys(self, state: State, group: Group, count: int) -> tuple[ChunkKeys, ...]:
        """Return the keys of the first `count` blocks, for each shard."""
        rows, per_block = state.parts[group.number].keys, group.block_tokens // self.hash_tokens
        if count > len(rows):
            assert state.contents is not None, "named before"
            ends = state.request.block_hashes[(len(rows) + 1) * per_block - 1 : count * per_block : per_block]
            hashes = state.contents.fold([bytes(end) for end in ends], len(rows), group.block_tokens)
            digests = ChunkKeys(b"".join(hashes))
            rows += zip(*(engine_keys(space, digests) for space in self.spaces(state, group)), strict=True)
        shards = len(self.namespaces[group.number])
        return tuple(ChunkKeys(b"".join(row[shard] for row in rows[:count])) for shard in range(shards))
