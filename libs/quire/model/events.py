"""What is told of chunks as they come and go, so that routers send requests where their KV lies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quire.model.keys import ChunkKeys


class EventKind(Enum):
    """STORED: a holder has chunks; REMOVED: it has them no more; CLEARED: it has none, and no keys are said."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvent:
    """`holder`: a storage node, or `OBJECT_TIER`. `parents`: of STORED, each chunk's, 32 bytes, zeros for none."""

    kind: EventKind
    holder: str
    keys: ChunkKeys
    parents: bytes = b""
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events in order, and the cursor behind them. `lost`: some that came after the cursor before are not kept."""

    events: tuple[CacheEvent, ...]
    cursor: str
    lost: bool = False
