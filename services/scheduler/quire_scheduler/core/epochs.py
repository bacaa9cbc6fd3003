"""Epochs of one link: rates stay as they are until the epoch ends (ObjectCache, §3.6).

A newcomer gets its share of what is not granted, at least an equal share; what a finished delivery frees returns at
the next epoch. A delivery that is not renewed for two epochs is forgotten: its storage node is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_scheduler.core.policy import Demand, Policy

_FORGET_EPOCHS = 2


@dataclass(frozen=True, slots=True)
class Grant:
    """A rate for the current epoch, which ends in `epoch_left_s`."""

    delivery: str
    rate_bytes_per_s: int
    epoch: int
    epoch_left_s: float


@dataclass(slots=True)
class _Admitted:
    demand: Demand
    rate: int
    seen_epoch: int


class LinkEpochs:
    """State machine of one link. Every method takes the time; nothing here reads a clock."""

    def __init__(self, budget_bytes_per_s: int, epoch_s: float, policy: Policy) -> None:
        self._budget = budget_bytes_per_s
        self._epoch_s = epoch_s
        self._policy = policy
        self._epoch = 0
        self._admitted: dict[str, _Admitted] = {}

    def __len__(self) -> int:
        return len(self._admitted)

    @property
    def granted_bytes_per_s(self) -> int:
        return sum(entry.rate for entry in self._admitted.values())

    def admit(self, demand: Demand, now_s: float) -> Grant:
        """Take a delivery in. Admitting it again replaces its demand."""
        self._advance(now_s)
        self._admitted.pop(demand.delivery, None)
        demands = [entry.demand for entry in self._admitted.values()] + [demand]
        share = self._policy(demands, self._budget)[-1]
        free = self._budget - self.granted_bytes_per_s
        if free < share:
            # Within an epoch nobody's rate falls, but a newcomer must not starve until the next one: it
            # starts on what is
            # left, and on a tenth of its share at the least.
            share = max(free, share // 10, 1)
        self._admitted[demand.delivery] = _Admitted(demand, share, self._epoch)
        return self._grant(demand.delivery, now_s)

    def renew(self, deliveries: dict[str, int], now_s: float) -> list[Grant]:
        """Layers left by delivery; grants for those that are known."""
        self._advance(now_s)
        grants = []
        for delivery in deliveries:
            entry = self._admitted.get(delivery)
            if entry is not None:
                entry.seen_epoch = self._epoch
                grants.append(self._grant(delivery, now_s))
        return grants

    def finish(self, delivery: str, now_s: float) -> bool:
        """Whether it was admitted. Its rate returns at the next epoch."""
        self._advance(now_s)
        return self._admitted.pop(delivery, None) is not None

    def _grant(self, delivery: str, now_s: float) -> Grant:
        left = (self._epoch + 1) * self._epoch_s - now_s
        return Grant(delivery, self._admitted[delivery].rate, self._epoch, left)

    def _advance(self, now_s: float) -> None:
        epoch = int(now_s / self._epoch_s)
        if epoch <= self._epoch:
            return
        self._epoch = epoch
        self._admitted = {
            name: entry for name, entry in self._admitted.items() if epoch - entry.seen_epoch <= _FORGET_EPOCHS
        }
        entries = list(self._admitted.values())
        rates = self._policy([entry.demand for entry in entries], self._budget)
        for entry, rate in zip(entries, rates, strict=True):
            entry.rate = rate
