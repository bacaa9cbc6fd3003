"""Configuration of the decoder, from QUIRE_DECODER_*."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import setting

PREFIX = "QUIRE_DECODER_"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Units are in the names."""

    listen: str = setting("127.0.0.1:7415", "host:port to listen on")
    advertise: str = setting("", "host:port under which others reach it; empty: as listened")
    node_id: str = setting("decoder-0", "name in the cluster")
    orchestrator_address: str = setting(
        "127.0.0.1:7411", "where the orchestrator listens", variable="QUIRE_ORCHESTRATOR_ADDRESS"
    )
    requests_max: int = setting(256, "requests at the same time; more are refused", minimum=1)
    stop_grace_s: float = setting(2.0, "time for running requests at SIGTERM", minimum=0)
