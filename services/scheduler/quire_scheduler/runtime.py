"""The links of the cluster and their epochs, as long as this scheduler leads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.model.errors import TooManyRequests
from quire.model.nodes import SchedulerInfo
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.curves import Learned
from quire_scheduler.core.epochs import EpochGrant, LinkEpochs
from quire_scheduler.core.factory import make_policy
from quire_scheduler.core.policy import Demand, Observation
from quire_scheduler.errors import UnknownLink
from quire_scheduler.leadership import Leadership
from quire_scheduler.ports import Clock

_FORGOTTEN_MAX = 64


class Scheduler:
    """Every method is one request. Raises `ConfigInvalid` for links or a policy that cannot be used."""

    def __init__(self, config: SchedulerConfig, clock: Clock, leadership: Leadership) -> None:
        self._config = config
        self._clock = clock
        self._leadership = leadership
        self._term = leadership.term
        self.observed = 0
        """Observations so far."""
        self._budgets = set(config.budgets.values())
        self._margins = {link: config.margin_share * budget for link, budget in config.budgets.items()}
        # Links of one budget are of one kind: observations of one count for all.
        self._kinds = {budget: make_policy(config.policy, config.margin_share * budget) for budget in self._budgets}
        self._policies = {link: self._kinds[budget] for link, budget in config.budgets.items()}
        self._link_of: dict[str, str] = {}
        self._links: dict[str, LinkEpochs] = {}
        self._clear()

    @property
    def admitted(self) -> int:
        return sum(len(link) for link in self._links.values())

    @property
    def info(self) -> SchedulerInfo:
        """Rate of another delivery: for look-ups that weigh a fetch against a recompute."""
        if not self._leadership.leading:
            return SchedulerInfo()
        self._advance()
        return SchedulerInfo(link_rates={name: link.newcomer_bytes_per_s for name, link in self._links.items()})

    @property
    def stats(self) -> dict[str, float]:
        if not self._leadership.leading:
            return {"leads": 0, "deliveries": 0}
        self._advance()
        stats: dict[str, float] = {"leads": 1, "deliveries": self.admitted, "observed": self.observed}
        for name, link in self._links.items():
            stats[f"link.{name}.budget"] = link.budget_bytes_per_s
            stats[f"link.{name}.granted"] = link.totals.granted
            stats[f"link.{name}.newcomer"] = link.newcomer_bytes_per_s
        return stats

    def admit(self, link: str, demand: Demand, held_bytes_per_s: int = 0) -> EpochGrant:
        self._check()
        if link not in self._links:
            raise UnknownLink(f"{link!r} has no budget; there are {', '.join(self._links)}", field="link")
        self._advance()
        if self.admitted >= self._config.deliveries_max:
            raise TooManyRequests(f"{self.admitted} deliveries are admitted")
        self._link_of[demand.delivery] = link
        return self._links[link].admit(demand, self._clock.monotonic_s(), held_bytes_per_s)

    def renew(self, layers_left: Mapping[str, int]) -> list[EpochGrant]:
        self._check()
        by_link: dict[str, dict[str, int]] = {}
        for delivery, layers in layers_left.items():
            if (link := self._link_of.get(delivery)) is not None:
                by_link.setdefault(link, {})[delivery] = layers
        now_s = self._clock.monotonic_s()
        return [grant for link, progress in by_link.items() for grant in self._links[link].renew(progress, now_s)]

    def finish(self, delivery: str) -> None:
        self._check()
        link = self._link_of.pop(delivery, None)
        if link is not None:
            self._links[link].finish([delivery], self._clock.monotonic_s())

    def observe(self, link: str, observation: Observation) -> None:
        """Learn from the result of a rate."""
        if link in self._policies:
            self._policies[link].observe(observation)
            self.observed += 1

    def learned(self) -> dict[str, list[Learned]]:
        """Return the learned curves, by kind of link."""
        curves = {str(budget): policy.curves.told() for budget, policy in self._kinds.items() if policy.curves}
        return {kind: curve for kind, curve in curves.items() if curve}

    def take_over(self, learned: Mapping[str, Sequence[Learned]]) -> None:
        """Know what the leader before knew."""
        for budget, policy in self._kinds.items():
            if policy.curves is not None:
                policy.curves.take_over(learned.get(str(budget), ()))

    def _check(self) -> None:
        """Check that this scheduler leads.

        The knowledge of an earlier leader is out of date: deliveries are admitted again. Raises `NotLeader`.
        """
        self._leadership.check()
        if self._leadership.term != self._term:
            self._term = self._leadership.term
            self._clear()
        if len(self._link_of) > 2 * self.admitted + _FORGOTTEN_MAX:
            alive = {name for link in self._links.values() for name in link.rates}
            self._link_of = {name: link for name, link in self._link_of.items() if name in alive}

    def _advance(self) -> None:
        for link in self._links.values():
            link.advance(self._clock.monotonic_s())

    def _clear(self) -> None:
        """A link that another leader may have shared out is quiet for an epoch: nodes report their rates first."""
        config = self._config
        self._link_of = {}
        self._links = {}
        for name, budget in config.budgets.items():
            above = config.above[name]
            self._links[name] = LinkEpochs(
                budget,
                config.epoch_ms / 1000,
                self._policies[name],
                margin=self._margins[name],
                at_once=config.at_once,
                quiet_from_s=self._leadership.since_s,
                above=self._links[above] if above else None,
            )
