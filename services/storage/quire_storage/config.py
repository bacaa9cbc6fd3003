"""Configuration of a storage node, from QUIRE_STORAGE_*."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import setting

PREFIX = "QUIRE_STORAGE_"


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Units are in the names."""

    listen: str = setting("127.0.0.1:7412", "host:port to listen on")
    advertise: str = setting("", "host:port under which others reach it; empty: as listened")
    node_id: str = setting("storage-0", "name in the cluster; survives restarts")
    folder: str = setting("", "where the pool file and its commit log lie; empty for memory only")
    arena_bytes: int = setting(1 << 30, "memory for chunks, and size of the pool file", minimum=1 << 20)
    slab_bytes: int = setting(64 << 20, "unit in which the arena is divided among chunk sizes", minimum=1 << 16)
    orchestrator_address: str = setting(
        "127.0.0.1:7411", "where the orchestrator listens", variable="QUIRE_ORCHESTRATOR_ADDRESS"
    )
    scheduler_address: str = setting(
        "127.0.0.1:7414", "where the scheduler listens", variable="QUIRE_SCHEDULER_ADDRESS"
    )
    cluster_secret: str = setting(
        "", "signs leases; the same at every service, not empty", variable="QUIRE_CLUSTER_SECRET", required=True
    )
    link: str = setting("default", "name of the shared link that this node sends over")
    link_bytes_per_s: int = setting(
        12_500_000_000, "what this node takes of the link when no scheduler answers", minimum=1
    )
    theta_bytes: int = setting(4 << 20, "payloads below it are delivered chunkwise (Eq. 2)", minimum=0)
    ucx_tls: str = setting("", "UCX transports, e.g. rc,tcp; empty lets UCX choose")
    transfer_timeout_s: float = setting(60.0, "deadline of one delivery or store", minimum=0.1)
    index_timeout_s: float = setting(5.0, "how long a stored chunk waits for its parent to be indexed", minimum=0.1)
    deliveries_max: int = setting(256, "deliveries at the same time; more are refused", minimum=1)
    ingests_max: int = setting(64, "stores at the same time; more are refused", minimum=1)
    requests_max: int = setting(1024, "requests at the same time; more are refused", minimum=1)
    stop_grace_s: float = setting(10.0, "time for running transfers at SIGTERM", minimum=0)
