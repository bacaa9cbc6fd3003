"""Configuration of the orchestrator, from QUIRE_ORCHESTRATOR_*."""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.config import MemberConfig, setting

PREFIX = "QUIRE_ORCHESTRATOR_"


@dataclass(frozen=True, slots=True)
class OrchestratorConfig(MemberConfig):
    """Units are in the names."""

    listen: str = setting("127.0.0.1:7411", "host:port to listen on")
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        "where the metadata live: redis://, rediss://, unix://, redis+cluster://, redis+sentinel://",
        variable="QUIRE_REDIS_URL",
    )
    heartbeat_ms: int = setting(1000, "how often members report", minimum=50)
    member_ttl_ms: int = setting(3000, "after how long without a report a member counts as dead", minimum=100)
    events_kept: int = setting(
        8192, "cache events kept for those that watch, of up to 256 chunks each; 0: none are told", minimum=0
    )
    object_grace_ms: int = setting(60_000, "how long an object that nothing lists is kept", minimum=1000)
    object_deletion_ms: int = setting(120_000, "longest time that deleting such an object may take", minimum=100)
    node_lost_ms: int = setting(600_000, "how long a node is away before what it held is withdrawn", minimum=100)
    sweep_ms: int = setting(5_000, "how often is looked for either", minimum=10)
    decoder_theta: int = setting(4, "requests at a decoder above which others take over (LatentBox, §4.4)", minimum=0)
    decode_timeout_s: float = setting(60.0, "after how long a decode that was not ended counts as ended", minimum=0.1)
    requests_max: int = setting(1024, "requests at the same time; more are refused", minimum=1)
    stop_grace_s: float = setting(5.0, "time for running requests at SIGTERM", minimum=0)

    def problems(self) -> list[str]:
        problems = MemberConfig.problems(self)
        if self.member_ttl_ms < 2 * self.heartbeat_ms:
            problems.append(
                f"QUIRE_ORCHESTRATOR_MEMBER_TTL_MS={self.member_ttl_ms}: less than twice "
                f"QUIRE_ORCHESTRATOR_HEARTBEAT_MS={self.heartbeat_ms}; one report that is late would cost a member"
            )
        return problems
