"""Policies carried out: chunks whose time is over go, and the coldest of those that are over a quota."""

from __future__ import annotations

from collections.abc import Sequence

from quire.model.errors import QuireError
from quire.model.policy import PolicyList
from quire.telemetry import logger
from quire_storage.ports import Clock, ClusterIndex
from quire_storage.tiers import Tiers


class Housekeeping:
    """A quota is shared equally by the storage nodes that are alive: prefixes are spread evenly over them."""

    def __init__(self, tiers: Tiers, index: ClusterIndex, clock: Clock, check_s: float) -> None:
        self._tiers = tiers
        self._index = index
        self._clock = clock
        self._check_s = check_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(self._check_s)
            try:
                await self._carry_out(await self._index.policies())
            except QuireError as error:
                logger().warning("policies cannot be carried out now", error=str(error))

    async def _carry_out(self, found: PolicyList) -> None:
        nodes, book = max(1, found.storage_nodes), self._tiers.residency.namespaces
        limited = [state for state in found.tenants if state.policy.stored_bytes_max and state.namespaces]
        alone = {policy.namespace: frozenset([policy.namespace]) for policy in found.namespaces}
        self._tiers.residency.follow({*alone.values(), *(state.namespaces for state in limited)})
        for policy in found.namespaces:
            mine = alone[policy.namespace]
            if policy.ttl_s:
                cutoff_ms = self._clock.now_ms() - 1000 * policy.ttl_s
                await self._evict(book.expired(mine, cutoff_ms), "expired")
            if policy.quota_bytes:
                await self._evict(book.excess(mine, policy.quota_bytes // nodes), "over the namespace's quota")
        for state in limited:
            await self._evict(book.excess(state.namespaces, state.chunk_bytes_max // nodes), "over the tenant's quota")

    async def _evict(self, keys: Sequence[bytes], why: str) -> None:
        if keys:
            gone = await self._tiers.evict(keys)
            logger().info("chunks went by a policy", why=why, asked=len(keys), gone=gone)
