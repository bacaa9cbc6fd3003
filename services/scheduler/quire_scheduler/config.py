"""Configuration of the scheduler, from QUIRE_SCHEDULER_*."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.errors import ConfigInvalid
from quire_server.config import ServiceConfig, setting

PREFIX = "QUIRE_SCHEDULER_"


@dataclass(frozen=True, slots=True)
class SchedulerConfig(ServiceConfig):
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
    links: str = setting("default=12500000000", "budget B of each shared link, name=bytes/s, separated by commas")
    policy: str = setting(
        "adaptive", "who gets how much: equal, kv-prop, bw-prop, stall-opt, calibrated or adaptive (§3.6)"
    )
    margin_share: float = setting(0.05, "calibration margin δ of Eq. 7, as a share of the link's budget", minimum=0)
    at_once: bool = setting(False, "share anew whenever a delivery comes or goes, not at the next epoch")
    epoch_ms: int = setting(100, "length of an epoch", minimum=20)
    lease_ms: int = setting(1000, "how long a silent leader stays leader", minimum=10)
    deliveries_max: int = setting(65_536, "deliveries at the same time; more are refused", minimum=1)
    requests_max: int = setting(1024, "requests at the same time; more are refused", minimum=1)
    stop_grace_s: float = setting(2.0, "time for running requests at SIGTERM", minimum=0)

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes per second by link. Raises `ConfigInvalid`."""
        budgets = {}
        for part in self.links.split(","):
            name, _, value = part.strip().partition("=")
            try:
                budgets[name] = int(float(value))
            except ValueError:
                budgets[name] = 0
            if not name or budgets[name] <= 0:
                raise ConfigInvalid(f"QUIRE_SCHEDULER_LINKS: {part!r} is no link with a budget, name=bytes/s")
        return budgets
