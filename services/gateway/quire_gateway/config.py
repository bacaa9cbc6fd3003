"""Configuration of the gateway, from QUIRE_GATEWAY_*."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import setting

PREFIX = "QUIRE_GATEWAY_"


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Units are in the names."""

    listen: str = setting("127.0.0.1:7410", "host:port to listen on")
    advertise: str = setting("", "host:port under which others reach it; empty: as listened")
    node_id: str = setting("gateway-0", "name in the cluster")
    orchestrator_address: str = setting(
        "127.0.0.1:7411", "where the orchestrator listens", variable="QUIRE_ORCHESTRATOR_ADDRESS"
    )
    http_listen: str = setting("127.0.0.1:7480", "host:port of the HTTP door; empty for none")
    http_body_max: int = setting(64 << 20, "bytes of a request's body; larger ones are refused", minimum=1)
    http_requests_max: int = setting(64, "images at the same time through HTTP; more wait", minimum=1)
    decode_timeout_s: float = setting(30.0, "deadline of one decoder's answer", minimum=0.1)
    control_timeout_s: float = setting(5.0, "deadline of look-ups and other short requests", minimum=0.01)
    transfer_timeout_s: float = setting(120.0, "deadline of deliveries and stores", minimum=0.1)
    transfers_max: int = setting(256, "deliveries and stores at the same time; more are refused", minimum=1)
    requests_max: int = setting(1024, "requests at the same time; more are refused", minimum=1)
    stop_grace_s: float = setting(5.0, "time for running requests at SIGTERM", minimum=0)
