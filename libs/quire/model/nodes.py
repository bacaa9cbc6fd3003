"""Members of the cluster, as value types."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from quire.model.errors import InvalidRequest

_NODE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(Enum):
    """What a service of the cluster is."""

    STORAGE = "storage"
    DECODER = "decoder"
    GATEWAY = "gateway"
    SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class Location:
    """Where somebody runs; empty for unknown."""

    host: str = ""
    zone: str = ""

    def distance(self, other: Location) -> int:
        """0 on the same host, 1 in the same zone, 2 elsewhere."""
        if self.host and self.host == other.host:
            return 0
        return 1 if self.zone and self.zone == other.zone else 2


@dataclass(frozen=True, slots=True)
class Node:
    """One member. `node_id` survives restarts, `incarnation` does not. `figures` and `details` are for people."""

    node_id: str
    role: Role
    grpc_address: str
    worker_address: bytes
    incarnation: str
    protocol_version: int
    capacity_bytes: int = 0
    used_bytes: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    location: Location = field(default_factory=Location)
    details: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NODE_ID.fullmatch(self.node_id):
            raise InvalidRequest(f"{self.node_id!r} is not of letters, digits, '.', '_', '-'", field="node.node_id")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of chunks of one request at one storage node."""

    node_id: str
    grpc_address: str
    worker_address: bytes
    first_chunk: int
    chunk_count: int
