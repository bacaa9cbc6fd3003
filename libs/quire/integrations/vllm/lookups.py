"""Look-ups of a request's blocks, in all groups of layers and shards at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from quire.client import Lookup, SyncClient
from quire.integrations.vllm.groups import Group, Kind
from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.telemetry import logger

_LEASE_MS: Final = 60_000
_STATES_TRIED_MAX: Final = 3
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Asked:
    """Of one group: the keys of all blocks, and the namespace, of each shard."""

    group: Group
    shards: tuple[tuple[Namespace, ChunkKeys], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Of one group: blocks from `first` on, leased in each shard. `states`: blocks at whose ends Quire has a state."""

    shards: tuple[Lookup, ...] = ()
    first: int = 0
    states: frozenset[int] = frozenset()

    @property
    def blocks(self) -> int:
        """The block until which every shard has what a prefix needs."""
        count = min((len(found.keys) for found in self.shards), default=0)
        return self.first + count if count else 0


async def look_up(client: SyncClient, asked: Sequence[Asked], usable: int) -> tuple[Found, ...]:
    """Find the prefix of which every group has its part. States are looked for up to `usable` tokens.

    Raises what `QuireClient.lookup` raises.
    """
    leased: list[Lookup] = []
    try:
        found = await _all(_first_answer(client, part, leased) for part in asked)
        if any(part.group.kind is Kind.STATE for part in asked):
            found = await _with_states(client, asked, found, usable, leased)
    except BaseException:
        for lookup in leased:
            await let_go(client, lookup)
        raise
    kept = {id(lookup) for part in found for lookup in part.shards}
    for lookup in leased:
        if id(lookup) not in kept:
            await let_go(client, lookup)
    return tuple(found)


async def _first_answer(client: SyncClient, asked: Asked, leased: list[Lookup]) -> Found:
    """Of attention: the longest prefix, with leases. Of states: which there are, without."""
    if asked.group.kind is not Kind.STATE:
        return Found(tuple(await _leased(client, asked.shards, leased)))
    together = len(asked.shards[0][1]) > 1  # one key is a prefix
    answers = await _all(
        client.asynchronous.lookup(namespace, keys, lease_ttl_ms=0, unchained=together)
        for namespace, keys in asked.shards
    )
    there = [set(answer.there) if together else set(range(len(answer.keys))) for answer in answers]
    return Found(states=frozenset(set.intersection(*there)))


async def _with_states(
    client: SyncClient, asked: Sequence[Asked], found: list[Found], usable: int, leased: list[Lookup]
) -> list[Found]:
    """Lease the states at the last tokens up to which every group has its part."""
    ends = [usable]
    candidates: list[set[int]] = []
    for part, there in zip(asked, found, strict=True):
        if part.group.kind is Kind.STATE:
            candidates.append({(block + 1) * part.group.block_tokens for block in there.states})
        else:
            ends.append(there.blocks * part.group.block_tokens)
    tokens = sorted(end for end in set.intersection(*candidates) if end <= min(ends))
    for end in reversed(tokens[-_STATES_TRIED_MAX:]):  # one may be evicted meanwhile
        chosen = []
        for part, there in zip(asked, found, strict=True):
            if part.group.kind is Kind.STATE:
                at = end // part.group.block_tokens - 1
                one = [(namespace, keys.run(at, 1)) for namespace, keys in part.shards]
                there = Found(tuple(await _leased(client, one, leased)), at, there.states)
            chosen.append(there)
        if all(there.blocks for there in chosen):
            return chosen
    return found


async def _leased(
    client: SyncClient, shards: Sequence[tuple[Namespace, ChunkKeys]], leased: list[Lookup]
) -> list[Lookup]:
    async def lease(namespace: Namespace, keys: ChunkKeys) -> Lookup:
        found = await client.asynchronous.lookup(namespace, keys, lease_ttl_ms=_LEASE_MS)
        leased.append(found)
        return found

    return await _all(lease(namespace, keys) for namespace, keys in shards)


async def _all(works: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Wait for all, and raise the first error once none runs any more."""
    ends = await asyncio.gather(*works, return_exceptions=True)
    answers = []
    for end in ends:
        if isinstance(end, BaseException):
            raise end
        answers.append(end)
    return answers


async def let_go(client: SyncClient, found: Lookup) -> None:
    """Release what nobody needs."""
    try:
        if found.lease:
            await client.asynchronous.release(found)
    except QuireError as error:
        logger().debug("a lease stays until it runs out", error=str(error))
