"""Events of chunks that are stored and removed, so that routers send requests to the nodes that have their KV."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quire.model.keys import ChunkKeys
from quire.model.records import NO_NAMESPACE


class EventKind(Enum):
    """STORED: a holder has chunks; REMOVED: it has them no more; CLEARED: it has none, and no keys are said."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvent:
    """`holder`: a storage node, or `OBJECT_TIER`. `parents`: of STORED, each chunk's, 32 bytes, zeros for none.

    `namespace`: first 16 bytes of the digest of the namespace that all chunks are of; zeros where it is not known.
    """

    kind: EventKind
    holder: str
    keys: ChunkKeys
    parents: bytes = b""
    at_ms: int = 0
    namespace: bytes = NO_NAMESPACE


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events in order, and the cursor behind them. `lost`: some that came after the cursor before are not kept."""

    events: tuple[CacheEvent, ...]
    cursor: str
    lost: bool = False
