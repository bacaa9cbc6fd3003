"""The links of the cluster and their epochs."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import TooManyRequests
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.epochs import Grant, LinkEpochs
from quire_scheduler.core.policy import Demand, Policy, equal_share
from quire_scheduler.ports import Clock


class Scheduler:
    """Every method is one request."""

    def __init__(self, config: SchedulerConfig, clock: Clock, policy: Policy = equal_share) -> None:
        self._config = config
        self._clock = clock
        self._policy = policy
        self._links: dict[str, LinkEpochs] = {}
        self._link_of: dict[str, str] = {}

    @property
    def admitted(self) -> int:
        return sum(len(link) for link in self._links.values())

    def admit(self, link: str, demand: Demand) -> Grant:
        if self.admitted >= self._config.deliveries_max:
            raise TooManyRequests(f"{self.admitted} deliveries are admitted")
        epochs = self._links.get(link)
        if epochs is None:
            epochs = LinkEpochs(self._config.link_bytes_per_s, self._config.epoch_ms / 1000, self._policy)
            self._links[link] = epochs
        self._link_of[demand.delivery] = link
        return epochs.admit(demand, self._clock.monotonic_s())

    def renew(self, layers_left: Mapping[str, int]) -> list[Grant]:
        by_link: dict[str, dict[str, int]] = {}
        for delivery, layers in layers_left.items():
            if (link := self._link_of.get(delivery)) is not None:
                by_link.setdefault(link, {})[delivery] = layers
        now_s = self._clock.monotonic_s()
        return [grant for link, known in by_link.items() for grant in self._links[link].renew(known, now_s)]

    def finish(self, delivery: str) -> None:
        link = self._link_of.pop(delivery, None)
        if link is not None:
            self._links[link].finish(delivery, self._clock.monotonic_s())
            if not len(self._links[link]):
                del self._links[link]
