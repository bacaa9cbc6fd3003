"""Who is next: tenants take turns, and of one tenant the oldest."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """A tenant with many items does not delay one with few."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, tenant: str, item: Item) -> None:
        self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> Item:
        """Of the tenant whose turn is longest ago. Raises `IndexError` where nothing waits."""
        if not self._waiting:
            raise IndexError("nothing waits")
        tenant, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items
        return item

    def remove(self, tenant: str, item: Item) -> bool:
        """Whether it waited."""
        items = self._waiting.get(tenant, deque())
        if item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[tenant]
        return True
