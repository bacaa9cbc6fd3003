"""Members of the cluster, as value types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from quire.model.errors import InvalidRequest
from quire.model.object_part import ObjectSpeed

_NODE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(Enum):
    """Role of a service in the cluster."""

    STORAGE = "storage"
    DECODER = "decoder"
    GATEWAY = "gateway"
    SCHEDULER = "scheduler"


class StorageState(Enum):
    """State of a storage node, as operators have set it."""

    ACTIVE = "active"
    """It takes stores and keeps chunks."""
    DRAINING = "draining"
    """Its chunks are copied to others, and it takes none where another node can."""
    DECOMMISSIONED = "decommissioned"
    """It is not used any more: it refuses stores."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Loss of chunks to expect if a storage node is removed.

    Attributes:
        state: As operators have set it.
        is_alive: Whether it is alive.
        left_chunks: Chunks that it has still to copy, or to find other copies of, as it reports.
        sole_chunks: Chunks that the index lists for it, and neither for the object tier nor for a node that stays. 0
            while the node is copying: they are counted when it has reported that nothing is left.
        is_drained: Whether there are none, and the node has reported so itself.
        is_safe: Whether it can be stopped for good: it is drained, decommissioned and refuses stores. Never of a node
            that is away: it may have chunks that nobody knows of.
        reason: Why not, for people; "" if it is safe.
    """

    state: StorageState
    is_alive: bool
    left_chunks: int = 0
    sole_chunks: int = 0
    is_drained: bool = False
    is_safe: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Location:
    """Place where a member or a client runs; empty for unknown."""

    host: str = ""
    zone: str = ""

    def distance(self, other: Location) -> int:
        """0 on the same host, 1 in the same zone, 2 elsewhere."""
        if self.host and self.host == other.host:
            return 0
        return 1 if self.zone and self.zone == other.zone else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageInfo:
    """A storage node. `link`: the scheduler's name for the link by which it delivers. Sizes of chunks, in bytes.

    `object_speed`: of the object tier, if it has one. `reached`: the state whose work it has done. `DRAINING`: nodes
    that stay, or the object tier, have each of its chunks, replicated ones twice. `DECOMMISSIONED`: and it refuses
    stores.
    """

    worker_address: bytes = b""
    capacity_bytes: int = 0
    used_bytes: int = 0
    link: str = ""
    has_object_tier: bool = False
    object_speed: ObjectSpeed | None = None
    reached: StorageState = StorageState.ACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownVae:
    """A VAE that a decoder has. `weights_sha256`: of its weights file, hexadecimal; `name`: of its folder.

    `channels` of its latents; `scale`: pixels for each of a latent's values, along each side. `scaling_factor` and
    `shift_factor`: as its configuration says, 1 and 0 for none; `latents_mean` and `latents_std` per channel, empty for
    none.
    """

    weights_sha256: str
    name: str = ""
    class_name: str = ""
    channels: int
    scale: int
    scaling_factor: float = 1.0
    shift_factor: float = 0.0
    latents_mean: tuple[float, ...] = ()
    latents_std: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderInfo:
    """A decoder.

    Attributes:
        build: Images of one build are equal.
        capacity_bytes: Of its cache.
        used_bytes: Of its cache.
        vaes: That it decodes with.
        signer: Names the certificate that it signs provenance with.
        queued: Latents that wait for its devices or are being decoded.
        devices: That decode, at least one.
    """

    build: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    vaes: tuple[KnownVae, ...] = ()
    signer: str = ""
    queued: int = 0
    devices: int = 1


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    """A gateway: its description decides nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerInfo:
    """A scheduler. `link_rates`: of the leader, the rate of one more delivery on each link, in bytes/s."""

    link_rates: Mapping[str, int] = field(default_factory=dict)


Info = StorageInfo | DecoderInfo | GatewayInfo | SchedulerInfo
_ROLES: Final[dict[type, Role]] = {
    StorageInfo: Role.STORAGE,
    DecoderInfo: Role.DECODER,
    GatewayInfo: Role.GATEWAY,
    SchedulerInfo: Role.SCHEDULER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDelivery:
    """A delivery that a storage node carries out.

    `layers_sent`: those that the transport has taken. `rate_bytes_per_s`: as the scheduler granted it; 0 for none.
    `tenant`: its tag, as metrics have it.
    """

    delivery_id: bytes
    tenant: str = ""
    layers: int
    layers_sent: int = 0
    bytes_per_layer: int = 0
    rate_bytes_per_s: int = 0
    running_ms: int = 0

    @property
    def short_id(self) -> str:
        """Short form of the id, for people."""
        return self.delivery_id.hex()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A member.

    `node_id` survives restarts, `incarnation` does not. `about`: its role, and the facts that others decide by.

    `stats`, `tenant_stats`, `notes` and `running` are for people, metrics and checks of health. `state`: of a storage
    node, as operators set it. `is_away`: a storage node that is expected and not alive; only its name is known.
    """

    node_id: str
    about: Info
    grpc_address: str = ""
    incarnation: str = ""
    protocol_version: int = 0
    location: Location = field(default_factory=Location)
    stats: Mapping[str, float] = field(default_factory=dict)
    tenant_stats: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    running: Sequence[RunningDelivery] = ()
    state: StorageState = StorageState.ACTIVE
    is_away: bool = False

    def __post_init__(self) -> None:
        if not _NODE_ID.fullmatch(self.node_id):
            why = f"{self.node_id!r}: a letter or digit, then letters, digits, '.', '_', '-'"
            raise InvalidRequest(why, field="node.node_id")

    @property
    def role(self) -> Role:
        """Role of the member."""
        return _ROLES[type(self.about)]

    @property
    def stays(self) -> bool:
        """Whether copies on it count: it is not to be removed."""
        return self.state is StorageState.ACTIVE

    @property
    def worker_address(self) -> bytes:
        """Address of a storage node's data plane; empty for others."""
        return self.about.worker_address if isinstance(self.about, StorageInfo) else b""

    @property
    def capacity_bytes(self) -> int:
        """Capacity of a storage node or a decoder's cache, bytes; 0 for others."""
        return self.about.capacity_bytes if isinstance(self.about, StorageInfo | DecoderInfo) else 0

    @property
    def used_bytes(self) -> int:
        """Bytes in a storage node or a decoder's cache; 0 for others."""
        return self.about.used_bytes if isinstance(self.about, StorageInfo | DecoderInfo) else 0

    @property
    def all_stats(self) -> dict[str, float]:
        """Return every number of its description, for metrics."""
        return {"capacity": self.capacity_bytes, "used": self.used_bytes, **self.stats, **self.tenant_stats}


def staying(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that are not to be removed; all, if that leaves none."""
    candidates = list(nodes)
    return [node for node in candidates if node.stays] or candidates


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Addresses of a storage node. `grpc_address` is empty where only the data plane is of interest.

    `protocol_version`: the newest protocol that the node speaks; 0 where that is unknown.
    """

    node_id: str
    grpc_address: str
    worker_address: bytes
    protocol_version: int = 0


@dataclass(frozen=True, slots=True)
class MemberSpans:
    """Some of the spans that a member keeps, each as JSON in the form of `QUIRE_TRACE_FOLDER`.

    `error`: why others are missing.
    """

    member: str
    spans: tuple[bytes, ...] = ()
    error: str = ""
