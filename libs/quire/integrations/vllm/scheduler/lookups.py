"""Look-ups of a request's blocks, in all groups of layers and shards concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from quire.client import Client, Lookup
from quire.integrations.vllm.groups import Group, Kind
from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.telemetry import logger

_LEASE_MS: Final = 60_000
_STATES_TRIED_MAX: Final = 3
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Query:
    """Names the blocks of one group: namespace and keys of each shard."""

    group: Group
    shards: tuple[tuple[Namespace, ChunkKeys], ...]


@dataclass(frozen=True, slots=True)
class RequestMatch:
    """Holds the leases on the blocks of one group.

    Args:
        shards: Look-up of each shard, of blocks from `first` on.
        first: Number of the first leased block.
        states: Numbers of the blocks at whose ends Quire has a state.
    """

    shards: tuple[Lookup, ...] = ()
    first: int = 0
    states: frozenset[int] = frozenset()

    @property
    def end(self) -> int:
        """Number of the block behind the last leased one; 0 without a lease in every shard."""
        count = min((len(lookup.keys) for lookup in self.shards), default=0)
        return self.first + count if count else 0


async def look_up(client: Client, queries: Sequence[Query], usable: int) -> tuple[RequestMatch, ...]:
    """Find and lease the longest prefix that every group has.

    Args:
        client: Client of the cluster.
        queries: One for each group.
        usable: Tokens at most up to which a state is of use.

    Raises:
        QuireError: See `AsyncClient.lookup`. All leases are released.
    """
    leases: list[Lookup] = []
    try:
        matches = await _all(_first_match(client, query, leases) for query in queries)
        if any(query.group.kind is Kind.STATE for query in queries):
            matches = await _with_states(client, queries, matches, usable, leases)
    except BaseException:
        for lookup in leases:
            await let_go(client, lookup)
        raise
    identities = {id(lookup) for match in matches for lookup in match.shards}
    for lookup in leases:
        if id(lookup) not in identities:
            await let_go(client, lookup)
    return tuple(matches)


async def _first_match(client: Client, query: Query, leases: list[Lookup]) -> RequestMatch:
    """Lease the longest prefix of a group with attention. List the states of a group without; they have no prefix."""
    if query.group.kind is not Kind.STATE:
        return RequestMatch(tuple(await _lease(client, query.shards, leases)))
    several = len(query.shards[0][1]) > 1  # a single key is a prefix
    lookups = await client.asynchronous.lookup_shards(query.shards, lease_ttl_ms=0, unchained=several)
    blocks = [set(lookup.there) if several else set(range(len(lookup.keys))) for lookup in lookups]
    return RequestMatch(states=frozenset(set.intersection(*blocks)))


async def _with_states(
    client: Client, queries: Sequence[Query], matches: list[RequestMatch], usable: int, leases: list[Lookup]
) -> list[RequestMatch]:
    """Lease the states at the last position up to which every other group has its blocks."""
    limit = usable
    positions: list[set[int]] = []
    for query, match in zip(queries, matches, strict=True):
        size = query.group.block_tokens
        if query.group.kind is Kind.STATE:
            positions.append({(block + 1) * size for block in match.states})
        else:
            limit = min(limit, match.end * size)
    candidates = sorted(position for position in set.intersection(*positions) if position <= limit)
    for position in reversed(candidates[-_STATES_TRIED_MAX:]):  # a state may be evicted before its lease
        leased = []
        for query, match in zip(queries, matches, strict=True):
            if query.group.kind is not Kind.STATE:
                leased.append(match)
                continue
            block = position // query.group.block_tokens - 1
            shards = [(namespace, keys.run(block, 1)) for namespace, keys in query.shards]
            leased.append(RequestMatch(tuple(await _lease(client, shards, leases)), block, match.states))
        if all(match.end for match in leased):
            return leased
    return matches


async def _lease(client: Client, shards: Sequence[tuple[Namespace, ChunkKeys]], leases: list[Lookup]) -> list[Lookup]:
    lookups = await client.asynchronous.lookup_shards(shards, lease_ttl_ms=_LEASE_MS)
    leases += lookups
    return lookups


async def _all(works: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Return all results. Raises the first error, after every work has ended."""
    ends = await asyncio.gather(*works, return_exceptions=True)
    answers = []
    for end in ends:
        if isinstance(end, BaseException):
            raise end
        answers.append(end)
    return answers


async def let_go(client: Client, lookup: Lookup) -> None:
    """Release a lease. A release that fails is logged: the lease expires."""
    try:
        if lookup.lease:
            await client.asynchronous.release(lookup)
    except QuireError as error:
        logger().debug("a lease stays until it runs out", error=str(error))
