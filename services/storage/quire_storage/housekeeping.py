"""Policies of namespaces carried out: chunks whose time is over go, and the coldest of those over their quota."""

from __future__ import annotations

from collections.abc import Sequence

from quire.model.errors import QuireError
from quire.model.policy import NamespacePolicy
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
                policies, nodes = await self._index.policies()
                self._tiers.residency.follow({policy.namespace for policy in policies})
                for policy in policies:
                    await self._carry_out(policy, max(1, nodes))
            except QuireError as error:
                logger().warning("policies cannot be carried out now", error=str(error))

    async def _carry_out(self, policy: NamespacePolicy, nodes: int) -> None:
        book = self._tiers.residency.namespaces
        if policy.ttl_s:
            cutoff_ms = self._clock.now_ms() - 1000 * policy.ttl_s
            await self._evict(book.expired(policy.namespace, cutoff_ms), "expired")
        if policy.quota_bytes:
            await self._evict(book.excess(policy.namespace, policy.quota_bytes // nodes), "over quota")

    async def _evict(self, keys: Sequence[bytes], why: str) -> None:
        if keys:
            gone = await self._tiers.evict(keys)
            logger().info("chunks went by their namespace's policy", why=why, asked=len(keys), gone=gone)
