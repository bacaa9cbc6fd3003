"""Configuration of the scheduler, from QUIRE_SCHEDULER_*."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import setting

PREFIX = "QUIRE_SCHEDULER_"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Units are in the names."""

    listen: str = setting("127.0.0.1:7414", "host:port to listen on")
    advertise: str = setting("", "host:port under which others reach it; empty: as listened")
    node_id: str = setting("scheduler", "name in the cluster")
    orchestrator_address: str = setting(
        "127.0.0.1:7411", "where the orchestrator listens", variable="QUIRE_ORCHESTRATOR_ADDRESS"
    )
    link_bytes_per_s: int = setting(12_500_000_000, "budget B of each link", minimum=1)
    epoch_ms: int = setting(100, "length of an epoch", minimum=1)
    deliveries_max: int = setting(65_536, "deliveries at the same time; more are refused", minimum=1)
    requests_max: int = setting(1024, "requests at the same time; more are refused", minimum=1)
    stop_grace_s: float = setting(2.0, "time for running requests at SIGTERM", minimum=0)
