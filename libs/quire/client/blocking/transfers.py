"""Transfers of the blocking client."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from quire.client.blocking.loop import SyncLoop
from quire.client.delivery import Delivery
from quire.client.lookup import Lookup
from quire.client.retrieval import Retrieval
from quire.client.store import StoreSession
from quire.model.errors import QuireError
from quire.model.outcome import FetchSummary, StoreSummary

_QUIET_TIMEOUT_S: Final = 10.0


class SyncRetrieval:
    """A `Retrieval`, blocking. `found`: the match; `delivery`: None if no chunk is to be delivered."""

    def __init__(self, loop: SyncLoop, retrieval: Retrieval) -> None:
        self.found: Lookup = retrieval.found
        self.delivery = SyncDelivery(loop, retrieval.delivery) if retrieval.delivery is not None else None


class SyncDelivery:
    """A `Delivery`, blocking. `delivery`: the one that it is of."""

    def __init__(self, loop: SyncLoop, delivery: Delivery) -> None:
        self._loop = loop
        self.delivery = delivery

    @property
    def stall_s(self) -> float:
        """Total time for which layers were waited for."""
        return self.delivery.stall_s

    @property
    def is_lent(self) -> bool:
        """Whether a storage node may still touch the buffer."""
        return self.delivery.is_lent

    def layer(self, layer: int) -> None:
        """Return when `layer` is complete in the buffer. Raises why it will never be."""
        # The last layer ends the count of stalls, which the delivery's loop sends to the storage nodes.
        if not self.delivery.arrived_ns[layer] or layer == self.delivery.num_layers - 1:
            self._loop.run(self.delivery.layer(layer))

    def arrival(self, layer: int) -> None:
        """Return when `layer` is complete, as `Delivery.arrival`."""
        if not self.delivery.arrived_ns[layer]:
            self._loop.run(self.delivery.arrival(layer))

    def wanted(self, at_ns: Sequence[int]) -> None:
        """Report an engine's waits for layers, as `Delivery.wanted`."""
        self._loop.post(lambda: self.delivery.wanted(at_ns))

    def summary(self) -> FetchSummary:
        """Wait for the end, as `Delivery.summary`."""
        return self._loop.run(self.delivery.summary())

    def is_whole(self, chunks: int) -> bool:
        """Wait until the nodes have ended; whether they have delivered all of `chunks`, as `Delivery.is_whole`."""
        return self._loop.run(self.delivery.is_whole(chunks))

    def quiesced(self, timeout_s: float) -> None:
        """Return when every storage node has stopped using the buffer.

        Raises `DeadlineExceeded`: then do not reuse it.
        """
        self._loop.run(self.delivery.quiesced(timeout_s), timeout_s)

    def cancel(self, timeout_s: float = 10.0) -> None:
        """Give up, as `Delivery.cancel`."""
        self._loop.run(self.delivery.cancel(timeout_s), timeout_s)


class SyncStoreSession:
    """A `StoreSession`, blocking. As a context manager it commits at the end, and aborts where an exception ends it."""

    def __init__(self, loop: SyncLoop, session: StoreSession) -> None:
        self._loop = loop
        self._session = session

    def __enter__(self) -> SyncStoreSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            with contextlib.suppress(QuireError):  # the buffer then stays lent
                self.cancel()
            return
        self._loop.run(self._session.__aexit__(None), _QUIET_TIMEOUT_S)

    @property
    def known_chunks(self) -> int:
        """How many chunks from the start were stored already."""
        return self._session.known_chunks

    @property
    def is_lent(self) -> bool:
        """Whether a storage node may still touch the buffer."""
        return self._session.is_lent

    def layer_ready(self, layer: int) -> None:
        """The layer of all chunks is in the buffer: storage nodes may read it now."""

        async def produced() -> None:
            self._session.layer_ready(layer)

        self._loop.run(produced())

    def commit(self) -> StoreSummary:
        """Wait for the acknowledgement, as `StoreSession.commit`; again, return it again."""
        return self._loop.run(self._session.commit())

    def acknowledged(self) -> None:
        """Wait as `commit` does, without its summary, as `StoreSession.acknowledged`."""
        self._loop.run(self._session.acknowledged())

    def quiesced(self, timeout_s: float) -> None:
        """Return when every storage node has stopped reading the buffer."""
        self._loop.run(self._session.quiesced(timeout_s), timeout_s)

    def cancel(self, timeout_s: float = 10.0) -> None:
        """Give up, as `StoreSession.cancel`."""
        self._loop.run(self._session.cancel(timeout_s), timeout_s)
