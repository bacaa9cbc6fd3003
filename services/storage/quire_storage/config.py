"""Configuration of a storage node, from QUIRE_STORAGE_*."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.errors import ConfigInvalid
from quire.model.permit import TRANSFER_S_MAX
from quire.transport import users
from quire_server.config import MemberConfig, setting
from quire_storage.core.pool.slots import ALIGNMENT

PREFIX = "QUIRE_STORAGE_"


@dataclass(frozen=True, slots=True)
class StorageConfig(MemberConfig):
    """Units are in the names."""

    listen: str = setting("127.0.0.1:7412", "host:port to listen on")
    advertise: str = setting("", "host:port under which others reach it; empty: as listened")
    node_id: str = setting("storage-0", "name in the cluster; survives restarts")
    zone: str = setting("", "zone or rack; replicas go to others, reads come from the same", variable="QUIRE_ZONE")
    arena_bytes: int = setting(1 << 30, "memory for chunks", minimum=1 << 20)
    huge_pages: bool = setting(False, "take it from huge pages that were set apart (2 MiB each)")
    slab_bytes: int = setting(64 << 20, "unit in which memory and drives are divided among shapes", minimum=1 << 16)
    staging_bytes: int = setting(
        256 << 20, "memory that layers pass through on their way from a drive", minimum=1 << 16
    )
    block_bytes: int = setting(16 << 20, "what is read, verified and sent at a time; a slice must fit", minimum=1 << 12)
    drives: str = setting("", "folders, one on each drive, separated by commas; empty for memory only", folders=True)
    drive_bytes: int = setting(4 << 30, "size of the pool's file on each drive, preallocated", minimum=1 << 20)
    stripe_bytes: int = setting(256 << 10, "what of a layer lies together on one drive", minimum=1 << 12)
    chunk_bytes_min: int = setting(64 << 10, "chunk size for which a new pool has headers enough", minimum=1 << 12)
    io: str = setting(
        "auto",
        "io_uring, threads, or auto for the better one that this kernel offers",
        choices=("auto", "io_uring", "threads"),
    )
    io_depth: int = setting(128, "reads and writes with the drives at a time", minimum=1)
    direct: bool = setting(True, "O_DIRECT where the file system has it")
    write_age_s_max: float = setting(1.0, "how long reads may hold writes back", minimum=0.001)
    write_backlog_bytes: int = setting(256 << 20, "how much of writes reads may hold back", minimum=1 << 20)
    pool_high_share: float = setting(0.95, "from how much on the drives are trimmed", minimum=0.01, maximum=1)
    pool_low_share: float = setting(0.90, "down to how much", minimum=0.01, maximum=1)
    room_timeout_s: float = setting(5.0, "how long a store waits for memory to come free", minimum=0.01)
    object_url: str = setting(
        "", "object tier: s3://bucket/prefix, gs://, az://, or a folder; empty for none", folders=True
    )
    object_lag_bytes: int = setting(1 << 30, "how much may be missing in the object tier before stores wait", minimum=1)
    object_timeout_s: float = setting(30.0, "deadline of one request to the object tier", minimum=0.1)
    preallocate: bool = setting(True, "reserve a new pool's space at once; without it a full disk fails writes later")
    drive_error_s_max: int = setting(
        30, "a drive is retired that fails reads in more seconds of ten minutes", minimum=1
    )
    drive_write_error_s_max: float = setting(
        3.0, "a drive is retired that goes on failing a write for longer", minimum=0
    )
    scrub_bytes_per_s: int = setting(20_000_000, "pace of the scrubber", minimum=1)
    replication_bytes_per_s: int = setting(200_000_000, "pace of re-replication after a node was lost", minimum=1)
    hot_share: float = setting(
        0.5, "share of link_bytes_per_s above which what is read most is copied to other nodes; 0: never", minimum=0
    )
    hot_idle_s: float = setting(60.0, "for how long such a copy stays when it is not read much", minimum=0.1)
    replication_check_s: float = setting(2.0, "how often a node looks whether others were lost", minimum=0.05)
    policy_check_s: float = setting(10.0, "how often policies of namespaces are carried out", minimum=0.05)
    orchestrator_address: str = setting(
        "127.0.0.1:7411", "where the orchestrator listens", variable="QUIRE_ORCHESTRATOR_ADDRESS"
    )
    scheduler_address: str = setting(
        "127.0.0.1:7414", "where the schedulers listen, separated by commas", variable="QUIRE_SCHEDULER_ADDRESS"
    )
    link: str = setting("default", "name of the shared link that this node sends over")
    link_bytes_per_s: int = setting(
        12_500_000_000, "what this node takes of the link when no scheduler answers", minimum=1
    )
    theta_bytes: int = setting(4 << 20, "payloads below it are delivered chunkwise (Eq. 2)", minimum=0)
    theta_object_bytes: int = setting(0, "the same of payloads from the object tier; 0: none is", minimum=0)
    ucx_tls: str = setting("", "UCX transports, e.g. rc,tcp; empty lets UCX choose")
    shared_memory: str = setting(
        "",
        "folder of the sockets by which clients of this host share memory, `off` for none; empty: one of this user's",
        variable="QUIRE_SHARED_MEMORY",
    )
    shared_memory_uids: str = setting(
        "",
        "users beside this one whose processes may, by number, separated by commas",
        variable="QUIRE_SHARED_MEMORY_UIDS",
    )
    transfer_timeout_s: float = setting(60.0, "deadline of one delivery or store", minimum=0.1, maximum=TRANSFER_S_MAX)
    index_timeout_s: float = setting(5.0, "how long a stored chunk waits for its parent to be indexed", minimum=0.1)
    chunkwise_max: int = setting(8, "chunkwise deliveries at the same time; more wait their tenant's turn", minimum=1)
    wire_bytes: int = setting(8 << 20, "in flight at a time while several deliveries share the wire", minimum=1 << 16)
    deliveries_max: int = setting(512, "deliveries at a time, which tenants share; more are refused", minimum=1)
    ingests_max: int = setting(256, "stores at a time, which tenants share; more are refused", minimum=1)
    group_bytes: int = setting(32 << 20, "of a store: written to drives while what is behind it is read", minimum=1)
    requests_max: int = setting(1024, "requests at the same time; more are refused", minimum=1)
    stop_grace_s: float = setting(10.0, "time for running transfers at SIGTERM", minimum=0)

    def problems(self) -> list[str]:
        problems = MemberConfig.problems(self)
        if self.slab_bytes % ALIGNMENT:
            problems.append(
                f"QUIRE_STORAGE_SLAB_BYTES={self.slab_bytes}: must be a multiple of {ALIGNMENT}, as drives are"
            )
        problems += [
            f"QUIRE_STORAGE_SLAB_BYTES={self.slab_bytes}: more than QUIRE_STORAGE_{name}={limit} has room for"
            for name, limit, used in (
                ("ARENA_BYTES", self.arena_bytes, True),
                ("DRIVE_BYTES", self.drive_bytes, bool(self.drive_folders)),
            )
            if used and self.slab_bytes > limit
        ]
        if self.pool_low_share > self.pool_high_share:
            problems.append(
                f"QUIRE_STORAGE_POOL_LOW_SHARE={self.pool_low_share}: "
                f"above QUIRE_STORAGE_POOL_HIGH_SHARE={self.pool_high_share}"
            )
        try:
            users(self.shared_memory_uids)
        except ConfigInvalid as error:
            problems.append(str(error))
        return problems

    @property
    def shared_memory_users(self) -> list[int]:
        return users(self.shared_memory_uids)

    @property
    def drive_folders(self) -> list[str]:
        return [folder.strip() for folder in self.drives.split(",") if folder.strip()]

    @property
    def scheduler_addresses(self) -> list[str]:
        return [address.strip() for address in self.scheduler_address.split(",") if address.strip()]
