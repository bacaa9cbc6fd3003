"""Policies carried out: chunks whose time is over go, and the coldest of those that are over a quota."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

import numpy as np

from quire.model.errors import QuireError
from quire.model.policy import PolicyList
from quire.telemetry import logger
from quire_storage.core.namespaces import Group
from quire_storage.core.pool.map import Numbers
from quire_storage.ports import Clock, ClusterIndex
from quire_storage.tiers.tiers import Tiers

_PART: Final = 128
_IN_VAIN_MAX: Final = 8


class Housekeeping:
    """A quota is shared equally by the storage nodes that are alive: prefixes are spread evenly over them."""

    def __init__(self, *, tiers: Tiers, index: ClusterIndex, clock: Clock, threads: Executor, check_s: float) -> None:
        self._tiers = tiers
        self._index = index
        self._clock = clock
        self._threads = threads
        self._check_s = check_s

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._clock.sleep(self._check_s)
            try:
                await self._carry_out(await self._index.policies())
            except QuireError as error:
                logger().warning("policies cannot be carried out now", error=str(error))

    async def _carry_out(self, policies: PolicyList) -> None:
        nodes, book = max(1, policies.storage_nodes), self._tiers.residency.namespaces
        limited = [state for state in policies.tenants if state.policy.stored_bytes_max and state.namespaces]
        alone = {policy.namespace: Group([policy.namespace]) for policy in policies.namespaces}
        book.follow({*alone.values(), *(state.namespaces for state in limited)})
        if unknown := book.wanted:
            await self._walk(unknown)
        for policy in policies.namespaces:
            group = alone[policy.namespace]
            if policy.ttl_s:
                cutoff_ms = self._clock.now_ms() - 1000 * policy.ttl_s
                await self._evict(group, partial(book.expired, group, cutoff_ms), "expired")
            if policy.quota_bytes:
                share = policy.quota_bytes // nodes
                await self._evict(group, partial(book.excess, group, share), "over the namespace's quota")
        for state in limited:
            group, share = state.namespaces, state.chunk_bytes_max // nodes
            await self._evict(group, partial(book.excess, group, share), "over the tenant's quota")

    async def _evict(self, group: Group, choose: Callable[[], list[bytes] | None], why: str) -> None:
        requested, evicted, in_vain = 0, 0, 0
        while in_vain < _IN_VAIN_MAX and (keys := choose()) is not None:
            if not keys:
                await asyncio.sleep(0)
                continue
            went = await self._tiers.evict(keys)
            requested, evicted, in_vain = requested + len(keys), evicted + went, 0 if went else in_vain + 1
        self._tiers.residency.namespaces.put_back(group)
        if requested:
            logger().info("chunks went by a policy", why=why, asked=requested, gone=evicted)

    async def _walk(self, namespaces: frozenset[bytes]) -> None:
        """Add the chunks of these namespaces that are on this node, in steps, while chunks come and go."""
        residency = self._tiers.residency
        book, pool = residency.namespaces, residency.pool
        gc.freeze()  # the garbage collector does not walk the orders as they grow
        off_drives = residency.off_drives()
        for first in range(0, len(off_drives), _PART):
            book.entered([chunk for chunk in off_drives[first : first + _PART] if chunk.key in residency])
            await asyncio.sleep(0)
        if pool is not None:
            parts = []
            for part in pool.places_of(namespaces):
                parts.append(part)
                await asyncio.sleep(0)
            newest_first = await asyncio.get_running_loop().run_in_executor(self._threads, _newest_first, parts)
            for first in range(0, len(newest_first), _PART):
                book.add(pool.found_at(newest_first[first : first + _PART]), residency.__contains__)
                await asyncio.sleep(0)
        book.walked(namespaces)


def _newest_first(parts: Sequence[tuple[Numbers, Numbers]]) -> Numbers:
    """Return the places of chunks, the newest first. `parts`: ages and places.

    Call it in a thread: there may be millions.
    """
    if not parts:
        return np.empty(0, dtype=np.uint64)
    ages, places = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    ordered: Numbers = np.take(places, np.argsort(ages)[::-1])
    return ordered
