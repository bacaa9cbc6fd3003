"""Instructions of the scheduler's half for the workers, for one step. All of it can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.client import Lookup
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowPlan:
    """Names a prefix of which another engine stores the blocks: namespace and keys of each shard.

    `wait_s`: for how long blocks are waited for whose store has not begun.
    """

    namespaces: tuple[Namespace, ...]
    keys: tuple[ChunkKeys, ...]
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Plans to load chunks of one group of layers, from `first` on, one into each of `blocks`.

    `found`: look-up of each shard; empty where nothing could be read. `follow`: load blocks, too, while another engine
    stores them. `worth_s`: time to compute the blocks, `hidden_s`: time for which the step computes;
    0 for unknown. `priority`: as of `Urgency`. `trace`: headers that name the request's trace.
    """

    request_id: str
    group: int
    found: tuple[Lookup, ...]
    first: int
    blocks: tuple[int, ...]
    asynchronous: bool
    follow: FollowPlan | None = None
    worth_s: float = 0.0
    hidden_s: float = 0.0
    priority: int = 0
    trace: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TryPlan:
    """A number of chunks from `first` on, to be delivered only to measure the time."""

    group: int
    found: tuple[Lookup, ...]
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """Chunks from `first` on of a prefix, one in each of `blocks`; `keys` are those of all of it, shard by shard.

    `known`: chunks from the start that Quire had when it was asked. `state`: block at whose end the state of a store
    is; None for stores of blocks. `handed_over`: another engine waits for it, and its request has no later step.
    `trace`: headers that name the request's trace.
    """

    request_id: str
    group: int
    namespaces: tuple[Namespace, ...]
    keys: tuple[ChunkKeys, ...]
    known: int
    first: int
    blocks: tuple[int, ...]
    state: int | None = None
    handed_over: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstored:
    """Reports chunks that a worker did not store, from `first` on, or a state. `later`: for lack of room."""

    request_id: str
    group: int
    first: int
    later: bool
    state: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """Reports a store that Quire has acknowledged to one worker: chunks from `first` on, or a state."""

    request_id: str
    group: int
    first: int
    state: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A load that is over in one shard and group. `arrived`: whether all of it did."""

    request_id: str
    group: int
    arrived: bool


@dataclass(slots=True)
class StepPlan:
    """Plan of one step. `abandoned`: requests that are over; `idle`: there is nothing to compute."""

    loads: list[LoadPlan] = field(default_factory=list)
    tries: list[TryPlan] = field(default_factory=list)
    stores: list[StorePlan] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    idle: bool = False


class LoadTime(NamedTuple):
    """Time that a load took, or would have taken. `cold`: with blocks that the object tier alone had."""

    blocks: int
    seconds: float
    cold: bool = False


def is_cold(plan: LoadPlan | TryPlan, count: int) -> bool:
    """Return whether the object tier alone had some of the `count` blocks of a plan when they were looked up."""
    return any(lookup.objects.chunks(plan.first, plan.first + count) for lookup in plan.found)
