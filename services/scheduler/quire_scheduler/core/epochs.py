"""Epochs of one link: rates stay unchanged until the epoch ends (ObjectCache, §3.6).

Granted rates never exceed the budget. (A node receives its new rates up to an epoch after another has begun with its
own: on the wire the sum may be above it for the length of a renewal.) A newcomer starts with its part, or with half of
what is not granted if that is more (its first layer is waited for, whatever its window), or with what there is, if need
be with nothing. One that found less than its part is short: it is to look again soon, and rates that finished
deliveries have freed raise it, up to its part. Rates rise within an epoch, and none falls. What is freed is there for
newcomers and for those that are short at once, and for the others at the next epoch; with `at_once` every rate is
computed anew whenever a delivery comes or goes. A delivery that is not renewed for two epochs is forgotten: its storage
node is gone. (Up to eight epochs that passed unseen count as one: this scheduler did not come to run.)

The credit of nodes that wait for the rates of new deliveries is a quarter of the budget, shared among the nodes that
used the link within a minute: the rates then make up for it.

A link below others (`tree.py`) grants no more than any of them has left, and divides what it gets of them. The epochs
of a tree begin together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quire_scheduler.core.policy import Demand, Policy
from quire_scheduler.core.tenants import allocate, allocate_last, claim
from quire_scheduler.core.tree import Totals, TreeLink

_FORGET_EPOCHS = 2
_ASLEEP_EPOCHS = 8
_LOOK_AGAIN_S = 0.01
_CREDIT_SHARE = 0.25
_NODE_USES_LINK_S = 60.0


@dataclass(frozen=True, slots=True)
class EpochGrant:
    """A rate, good for `left_s`; 0 bytes per second: wait, and renew.

    `credit_bytes_per_s`: shared rate of its node's deliveries without a rate. `short`: less than its part of the link;
    rates that become free within the epoch raise it.
    """

    delivery: str
    rate_bytes_per_s: int
    epoch: int
    left_s: float
    credit_bytes_per_s: int = 0
    short: bool = False


@dataclass(slots=True)
class _Admitted:
    demand: Demand
    rate: int
    short: bool = False
    missed_epochs: int = 0


class LinkEpochs(TreeLink):
    """State machine of one link. Every method takes the time; nothing here reads a clock.

    `margin` in bytes per second: how much a tenant may get beyond its zero-stall rates (Eq. 7). `quiet_from_s`: for an
    epoch from then on only those are admitted with a rate that have one, from a leader before.
    """

    def __init__(
        self,
        budget_bytes_per_s: int,
        epoch_s: float,
        policy: Policy,
        *,
        margin: float = 0.0,
        at_once: bool = False,
        quiet_from_s: float | None = None,
        above: LinkEpochs | None = None,
    ) -> None:
        super().__init__(budget_bytes_per_s, above)
        self._epoch_s = epoch_s
        self._policy = policy
        self._margin = margin
        self._at_once = at_once
        self._quiet_until_s = -math.inf if quiet_from_s is None else quiet_from_s + epoch_s
        self._epoch = 0
        self._more = False
        """A delivery of this tree has ended since those that are short here were looked at."""
        self._admitted: dict[str, _Admitted] = {}
        self._nodes: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._admitted)

    @property
    def granted_bytes_per_s(self) -> int:
        return sum(entry.rate for entry in self._admitted.values())

    @property
    def rates(self) -> dict[str, int]:
        """The current rate of every delivery."""
        return {name: entry.rate for name, entry in self._admitted.items()}

    def admit(self, demand: Demand, now_s: float, held_bytes_per_s: int = 0) -> EpochGrant:
        """Take a delivery in; admitting it again replaces its demand.

        `held_bytes_per_s`: a rate that it has from an earlier leader; it keeps that where the budget allows.
        """
        self.advance(now_s)
        self._admitted.pop(demand.delivery, None)
        self._changed()
        free = min(self.free_bytes_per_s, self._under_cap(demand))
        entry = _Admitted(demand, min(held_bytes_per_s, free), not free)
        self._admitted[demand.delivery] = entry
        self._changed()
        if self._at_once:
            self._share_all()
        elif not entry.rate and free and now_s >= self._quiet_until_s:
            demands = [entry.demand for entry in self._admitted.values()]
            part = int(allocate_last(self._policy, demands, self._part(), self._margin))
            entry.rate, entry.short = min(max(part, free // 2), free), part > free
            self._changed()
        return self._grant(demand.delivery, now_s)

    def renew(self, deliveries: Iterable[str], now_s: float) -> list[EpochGrant]:
        """Grants for those that are known."""
        self.advance(now_s)
        self._raise_short(now_s)
        grants = []
        for delivery in deliveries:
            entry = self._admitted.get(delivery)
            if entry is not None:
                entry.missed_epochs = 0
                grants.append(self._grant(delivery, now_s))
        return grants

    def finish(self, deliveries: Iterable[str], now_s: float) -> None:
        """Free their rates."""
        self.advance(now_s)
        finished = [self._admitted.pop(delivery, None) for delivery in deliveries]
        if any(finished):
            self._changed()
            for link in self._root()._tree():
                link._freed()
            if self._at_once:
                self._share_all()

    def _under_cap(self, demand: Demand) -> int:
        """Return the rest of the tenant's cap."""
        if not demand.cap_bytes_per_s:
            return self.budget_bytes_per_s
        granted = sum(entry.rate for entry in self._admitted.values() if entry.demand.tenant == demand.tenant)
        return max(0, demand.cap_bytes_per_s - granted)

    def _grant(self, delivery: str, now_s: float) -> EpochGrant:
        entry = self._admitted[delivery]
        left_s = (self._epoch + 1) * self._epoch_s - now_s
        if self._at_once or entry.short:
            left_s = min(left_s, _LOOK_AGAIN_S)
        return EpochGrant(delivery, entry.rate, self._epoch, left_s, self._credit(delivery, now_s), entry.short)

    def _credit(self, delivery: str, now_s: float) -> int:
        """Return the credit of the node whose delivery it is."""
        node = delivery.partition("/")[0]
        if node not in self._nodes:
            self._changed()
        self._nodes[node] = now_s
        return int(_CREDIT_SHARE * min(link.budget_bytes_per_s / link.totals.nodes for link in self._way()))

    def advance(self, now_s: float) -> None:
        """Begin the epoch that it is time for, on all links of the tree; every other method does that first."""
        epoch = int(now_s / self._epoch_s)
        if epoch <= self._epoch:
            return
        for link in self._root()._tree():
            link._turn(epoch, now_s)
        self._share_all()

    def _turn(self, epoch: int, now_s: float) -> None:
        passed, self._epoch = epoch - self._epoch, epoch
        for entry in self._admitted.values():
            entry.missed_epochs += passed if passed > _ASLEEP_EPOCHS else 1
        self._admitted = {
            name: entry for name, entry in self._admitted.items() if entry.missed_epochs <= _FORGET_EPOCHS
        }
        self._nodes = {name: used_s for name, used_s in self._nodes.items() if now_s - used_s < _NODE_USES_LINK_S}
        self._changed()

    def _freed(self) -> None:
        self._more = True

    def _own(self) -> Totals:
        claimed, weight, usable = claim([entry.demand for entry in self._admitted.values()], self._margin)
        budget = self.budget_bytes_per_s
        granted, nodes = self.granted_bytes_per_s, len(self._nodes)
        return Totals(min(claimed, budget), min(usable, budget), weight, granted, len(self._admitted), nodes)

    def _take(self, part_bytes_per_s: float) -> None:
        entries = list(self._admitted.values())
        if not entries:
            return
        rates = allocate(self._policy, [entry.demand for entry in entries], part_bytes_per_s, self._margin)
        for entry, rate in zip(entries, rates.tolist(), strict=True):
            entry.rate, entry.short = int(rate), False
        self._changed()

    def _raise_short(self, now_s: float) -> None:
        """Share out free rates among those that are short, in proportion to their lack."""
        if not self._more or now_s < self._quiet_until_s or not any(entry.short for entry in self._admitted.values()):
            return
        self._more = False
        free = self.free_bytes_per_s
        entries = list(self._admitted.values())
        parts = allocate(self._policy, [entry.demand for entry in entries], self._part(), self._margin)
        lacks = [(e, int(part) - e.rate) for e, part in zip(entries, parts.tolist(), strict=True) if e.short]
        share = min(1.0, free / max(1, sum(max(0, lack) for _, lack in lacks)))
        for entry, lack in lacks:
            extra = max(0, min(int(share * lack), self._under_cap(entry.demand)))
            entry.rate += extra
            entry.short = extra < lack
        self._changed()
