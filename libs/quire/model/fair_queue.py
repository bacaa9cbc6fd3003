"""A queue in which tenants take turns; items of one tenant are first in, first out. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """A tenant with many items does not delay one with few."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, tenant: str, item: Item) -> None:
        """Queue an item for a tenant."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> Item:
        """Pop an item of the tenant whose turn is longest ago. Raises `IndexError` where nothing waits."""
        if not self._waiting:
            raise IndexError("nothing waits")
        tenant, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items
        return item

    def count(self, matches: Callable[[Item], bool]) -> int:
        """Return how many items match."""
        return sum(1 for items in self._waiting.values() for item in items if matches(item))

    def take_alike(self, matches: Callable[[Item], bool], count: int) -> list[Item]:
        """Take up to `count` matching items, round-robin over tenants. The order of the other items is unchanged."""
        taken: list[Item] = []
        tenants = deque(self._waiting)
        while tenants and len(taken) < count:
            tenant = tenants.popleft()
            item = next(filter(matches, self._waiting[tenant]), None)
            if item is not None:
                self.remove(tenant, item)
                taken.append(item)
                if tenant in self._waiting:
                    tenants.append(tenant)
        return taken

    def remove(self, tenant: str, item: Item) -> bool:
        """Whether it waited."""
        items = self._waiting.get(tenant, deque())
        if item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[tenant]
        return True
