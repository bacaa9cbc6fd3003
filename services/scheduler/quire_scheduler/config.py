"""Configuration of the scheduler, from QUIRE_SCHEDULER_*."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.errors import ConfigInvalid
from quire_server.config import MemberConfig, setting

PREFIX = "QUIRE_SCHEDULER_"
_LINKS = f"{PREFIX}LINKS"


@dataclass(frozen=True, slots=True)
class SchedulerConfig(MemberConfig):
    """Units are in the names."""

    listen: str = setting("127.0.0.1:7414", "host:port to listen on")
    advertise: str = setting("", "host:port under which others reach it; empty: as listened")
    node_id: str = setting("scheduler", "name in the cluster")
    orchestrator_address: str = setting(
        "127.0.0.1:7411", "where the orchestrator listens", variable="QUIRE_ORCHESTRATOR_ADDRESS"
    )
    redis_url: str = setting(
        "", "where schedulers agree on a leader; empty: this one is alone", variable="QUIRE_REDIS_URL"
    )
    links: str = setting(
        "default=12500000000",
        "budget B of each shared link, name=bytes/s; of one below another, name@other=bytes/s; separated by commas",
    )
    policy: str = setting(
        "adaptive",
        "who gets how much: equal, kv-prop, bw-prop, stall-opt, calibrated or adaptive (§3.6)",
        choices=("equal", "kv-prop", "bw-prop", "stall-opt", "calibrated", "adaptive"),
    )
    margin_share: float = setting(0.05, "calibration margin δ of Eq. 7, as a share of the link's budget", minimum=0)
    at_once: bool = setting(False, "share anew whenever a delivery comes or goes, not at the next epoch")
    epoch_ms: int = setting(100, "length of an epoch", minimum=20)
    lease_ms: int = setting(1000, "how long a silent leader stays leader", minimum=10)
    deliveries_max: int = setting(65_536, "deliveries at the same time; more are refused", minimum=1)
    requests_max: int = setting(1024, "requests at the same time; more are refused", minimum=1)
    stop_grace_s: float = setting(2.0, "time for running requests at SIGTERM", minimum=0)

    def problems(self) -> list[str]:
        problems = MemberConfig.problems(self)
        try:
            _ = self.budgets
        except ConfigInvalid as error:
            problems.append(str(error))
        return problems

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes per second by link, each after the one above it. Raises `ConfigInvalid`."""
        return {name: budget for name, (_, budget) in self._links.items()}

    @property
    def above(self) -> dict[str, str]:
        """Parent of each link, empty for a root. Raises `ConfigInvalid`."""
        return {name: above for name, (above, _) in self._links.items()}

    @property
    def _links(self) -> dict[str, tuple[str, int]]:
        unplaced: dict[str, tuple[str, int]] = {}
        for part in self.links.split(","):
            place, _, value = part.strip().partition("=")
            name, at, above = place.partition("@")
            try:
                budget = int(float(value))
            except (ValueError, OverflowError):
                budget = 0
            if not name or budget <= 0 or bool(at) != bool(above):
                raise ConfigInvalid(f"{_LINKS}: {part!r} is no link with a budget, name=bytes/s or name@other=bytes/s")
            if name in unplaced:
                raise ConfigInvalid(f"{_LINKS}: {name!r} is named twice")
            unplaced[name] = (above, budget)
        links: dict[str, tuple[str, int]] = {}
        while unplaced:
            next_ = [name for name, (above, _) in unplaced.items() if not above or above in links]
            if not next_:
                raise ConfigInvalid(
                    f"{_LINKS}: {', '.join(unplaced)} lie below links that are not there, or in a circle"
                )
            links |= {name: unplaced.pop(name) for name in next_}
        return links
