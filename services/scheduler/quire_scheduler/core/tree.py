"""Links of links: the host's, the rack's, the spine's, each with a budget that those below it share.

A delivery names one link, and its bytes pass all links from there to the root. Above, budgets are divided by weighted
max-min fairness: each link below gets at most its deliveries' demand before all others have their shares, then the
rest; its weight is that of the tenants that use it. A link's own policy divides its budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from quire_scheduler.core.tenants import shares


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the deliveries of a link, or of all links below it too. Rates in bytes per second.

    `wanted`: with which nothing stalls; `usable`: what caps of tenants allow; `nodes`: storage nodes that deliver.
    """

    wanted: float = 0.0
    usable: float = 0.0
    weight: float = 0.0
    granted: int = 0
    deliveries: int = 0
    nodes: int = 0


class TreeLink(ABC):
    """A link with its place in the tree.

    A subclass returns the demand of its own deliveries, and takes their budget.
    """

    def __init__(self, budget_bytes_per_s: int, above: TreeLink | None) -> None:
        self.budget_bytes_per_s = budget_bytes_per_s
        self._above = above
        self._below: list[TreeLink] = []
        self._totals: Totals | None = None
        if above is not None:
            above._below.append(self)
            above._changed()

    @abstractmethod
    def _own(self) -> Totals:
        """Return the totals of the deliveries that name this link."""

    @abstractmethod
    def _take(self, part_bytes_per_s: float) -> None:
        """Divide this among the deliveries that name this link."""

    @abstractmethod
    def _turn(self, epoch: int, now_s: float) -> None:
        """A new epoch has begun; the parts come next."""

    @abstractmethod
    def _freed(self) -> None:
        """A delivery of this tree is over: there may be more for those that have less than their part."""

    @property
    def free_bytes_per_s(self) -> int:
        """Rate that no budget from here to the root has granted."""
        return min(max(0, link.budget_bytes_per_s - link.totals.granted) for link in self._way())

    @property
    def newcomer_bytes_per_s(self) -> int:
        """Rate of one more delivery: the free rate, or an equal share."""
        return max(
            self.free_bytes_per_s,
            min(link.budget_bytes_per_s // (link.totals.deliveries + 1) for link in self._way()),
        )

    @property
    def totals(self) -> Totals:
        """Totals of this link and of all below it."""
        if self._totals is None:
            parts = [self._own(), *(link.totals for link in self._below)]
            self._totals = Totals(
                min(self.budget_bytes_per_s, sum(part.wanted for part in parts)),
                min(self.budget_bytes_per_s, sum(part.usable for part in parts)),
                sum(part.weight for part in parts),
                sum(part.granted for part in parts),
                sum(part.deliveries for part in parts),
                sum(part.nodes for part in parts),
            )
        return self._totals

    def _changed(self) -> None:
        """Mark the totals from here to the root as out of date. Above unknown totals all are unknown."""
        link: TreeLink | None = self
        while link is not None and link._totals is not None:
            link._totals = None
            link = link._above

    def _part(self) -> float:
        """Return the share of the budgets from here to the root, for the deliveries that name this link."""
        return self._divided(self._whole())[self]

    def _share_all(self) -> None:
        """Every link of the tree takes its part."""
        root = self._root()
        unshared: list[tuple[TreeLink, float]] = [(root, float(root.budget_bytes_per_s))]
        taken: list[tuple[TreeLink, float]] = []
        while unshared:
            link, budget = unshared.pop()
            parts = link._divided(budget)
            taken.append((link, parts.pop(link)))
            unshared += parts.items()
        for link, part in taken:
            link._take(part)

    def _root(self) -> TreeLink:
        *_, root = self._way()
        return root

    def _tree(self) -> Iterator[TreeLink]:
        """Yield the links from this one down."""
        yield self
        for link in self._below:
            yield from link._tree()

    def _way(self) -> Iterator[TreeLink]:
        """Yield the links from this one to the root."""
        link: TreeLink | None = self
        while link is not None:
            yield link
            link = link._above

    def _whole(self) -> float:
        """Return the budget for this link and all below it."""
        if self._above is None:
            return float(self.budget_bytes_per_s)
        return self._above._divided(self._above._whole())[self]

    def _divided(self, budget: float) -> dict[TreeLink, float]:
        """Divide a budget among the links below, and this one for its own deliveries."""
        if not self._below:
            return {self: budget}
        claims = {self: self._own(), **{link: link.totals for link in self._below}}
        used = {
            link: (totals.wanted, totals.weight, totals.usable) for link, totals in claims.items() if totals.deliveries
        }
        return dict.fromkeys(claims, 0.0) | shares(used, budget)
