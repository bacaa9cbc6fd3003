"""Ends of transfers: at one storage node, and as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.model.descriptor import DeliveryOrder
from quire.model.errors import DeadlineExceeded, InternalError, Unavailable, by_code
from quire.model.ranges import ChunkRange


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """`delivered` has one byte per chunk of `ranges`, 1 or 0. `error_code` is empty for success.

    `quiesced`: the node has said that it touches the client's memory no more. `scheduled`: the rate (bytes per
    second, 0 for unpaced) came from the scheduler and not from the node's own fallback.
    """

    node_id: str
    ranges: tuple[ChunkRange, ...]
    delivered: bytes = field(repr=False)
    bytes_moved: int = 0
    order: DeliveryOrder = DeliveryOrder.LAYERWISE
    rate_bytes_per_s: int = 0
    scheduled: bool = False
    quiesced: bool = False
    error_code: str = ""
    error_message: str = ""

    def check(self) -> None:
        """Raise the error of a failed part.

        `Unavailable`, `DeadlineExceeded`, `InternalError`: the node may still be at the client's memory.
        """
        if not self.error_code:
            return
        kind = by_code(self.error_code)
        if not self.quiesced and not issubclass(kind, Unavailable | DeadlineExceeded | InternalError):
            kind = Unavailable
        raise kind(self.error_message)


@dataclass(frozen=True, slots=True)
class FetchSummary:
    """End of a delivery. `usable_chunks` from the first on are complete in every layer; `outcomes` are by node.

    `delivered`: for each chunk of the delivery a byte, 1 where all of it arrived.
    """

    usable_chunks: int
    bytes_moved: int
    outcomes: tuple[NodeOutcome, ...] = ()
    delivered: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """End of a store: chunks that it stored, and chunks of the prefix that were stored earlier."""

    stored_chunks: int
    known_chunks: int
    bytes_moved: int
    outcomes: tuple[NodeOutcome, ...] = ()
