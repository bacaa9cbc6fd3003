"""Bounds that tenants share. Pure."""

from __future__ import annotations

from collections import Counter


class SharedBound:
    """A tenant may take as much of `total` as it leaves to others: a half alone, 1/(N + 1) as one of N greedy tenants.

    A new tenant always finds room, and nothing is taken back from the others (dynamic thresholds: Choudhury and Hahne,
    1998). Callers without a tenant, as in a cluster without tokens, may take all of it.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken: Counter[str] = Counter()
        self.taken = 0
        """The sum over all tenants."""

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Take an amount for a tenant. Return False and take nothing if the tenant would exceed its share."""
        free = self._total - self.taken
        if amount > free or (tenant and self._taken[tenant] + amount > free):
            return False
        self._taken[tenant] += amount
        self.taken += amount
        return True

    def give_back(self, tenant: str, amount: int = 1) -> None:
        self._taken[tenant] -= amount
        self.taken -= amount
        if not self._taken[tenant]:
            del self._taken[tenant]
