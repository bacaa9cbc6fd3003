"""The client without asyncio: a loop in a thread, the same methods."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy.typing as npt
import uvloop
from opentelemetry import context as otel

from quire.client.buffers import Buffer
from quire.client.client import QuireClient
from quire.client.delivery import Delivery, FetchSummary
from quire.client.lookup import Lookup
from quire.client.store import StoreSession, StoreSummary
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability, OnExisting
from quire.model.errors import DeadlineExceeded
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.model.urgency import Urgency
from quire.transport import Transport
from quire.wire.tls import Tls

Result = TypeVar("Result")
_CLOSE_S: Final = 30.0


class SyncClient:
    """`with SyncClient("host:port") as client`. Methods as in `QuireClient`, blocking; safe from any thread."""

    def __init__(
        self,
        gateway_address: str,
        *,
        transport: Transport | None = None,
        timeout_s: float = 60.0,
        zone: str = "",
        tls: Tls | None = None,
        token: str = "",
    ) -> None:
        self._client = QuireClient(
            gateway_address, transport=transport, timeout_s=timeout_s, zone=zone, tls=tls, token=token
        )
        self._timeout_s = timeout_s
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-client", daemon=True)

    def __enter__(self) -> SyncClient:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Open the data plane. Raises `ConfigInvalid` without UCX."""
        self._thread.start()
        try:
            self.run(self._client.start())
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """Stop every transfer, wait until every storage node has stopped writing here, disconnect.

        Safe to call twice.
        """
        if self._loop.is_closed():
            return
        try:
            self.run(self._client.close(), _CLOSE_S)
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._timeout_s)
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Result], longer_s: float = 0.0) -> Result:
        """Run on the client's loop, in the caller's trace, and wait.

        Raises `DeadlineExceeded` after twice the client's `timeout_s`, and `longer_s`; the work is cancelled then.
        """
        current = otel.get_current()

        async def in_context() -> Result:
            token = otel.attach(current)
            try:
                return await coroutine
            finally:
                otel.detach(token)

        limit_s = self._timeout_s * 2 + longer_s
        running = asyncio.run_coroutine_threadsafe(in_context(), self._loop)
        try:
            return running.result(limit_s)
        except TimeoutError:
            if running.done():
                raise  # the work's own
            running.cancel()
            raise DeadlineExceeded(f"no end within {limit_s:g} s") from None

    @property
    def asynchronous(self) -> QuireClient:
        """The client whose methods `spawn` and `run` take."""
        return self._client

    def spawn(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run on the client's loop; do not wait."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def post(self, work: Callable[[], object]) -> None:
        """Call on the client's loop, soon; do not wait. In order. Nothing once the client is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def allocate(self, length: int) -> Buffer:
        """Registered host memory of `length` bytes. Close it with `free`."""
        return self._on_loop(lambda: self._client.allocate(length))

    def register(self, memory: Any) -> Buffer:
        """Register a numpy array or a torch tensor in place; on a GPU where UCX can reach it."""
        return self._on_loop(lambda: self._client.register(memory))

    def free(self, buffer: Buffer) -> None:
        """Close a buffer. Raises `TargetInvalid` while a storage node may still write to it."""
        self._on_loop(buffer.close)

    def lookup(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        *,
        lease_ttl_ms: int = 60_000,
        prompt_tokens: int = 0,
        device: str = "",
        unchained: bool = False,
    ) -> Lookup:
        """See `QuireClient.lookup`."""
        return self.run(
            self._client.lookup(
                namespace,
                keys,
                lease_ttl_ms=lease_ttl_ms,
                prompt_tokens=prompt_tokens,
                device=device,
                unchained=unchained,
            )
        )

    def fetch(
        self,
        lookup: Lookup,
        buffer: Buffer,
        *,
        first_chunk: int = 0,
        chunk_count: int | None = None,
        order: DeliveryOrder = DeliveryOrder.AUTO,
        urgency: Urgency | None = None,
        layer_stride: int = 0,
        chunk_offsets: npt.ArrayLike | None = None,
    ) -> SyncDelivery:
        """See `QuireClient.fetch`."""
        fetching = self._client.fetch(
            lookup,
            buffer,
            first_chunk=first_chunk,
            chunk_count=chunk_count,
            order=order,
            urgency=urgency,
            layer_stride=layer_stride,
            chunk_offsets=chunk_offsets,
        )
        return SyncDelivery(self, self.run(fetching))

    def retrieve(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        buffer: Buffer,
        *,
        first_chunk: int = 0,
        lease_ttl_ms: int = 60_000,
        prompt_tokens: int = 0,
        device: str = "",
        order: DeliveryOrder = DeliveryOrder.AUTO,
        urgency: Urgency | None = None,
        layer_stride: int = 0,
        chunk_offsets: npt.ArrayLike | None = None,
        unchained: bool = False,
    ) -> SyncRetrieval:
        """See `QuireClient.retrieve`."""
        retrieving = self._client.retrieve(
            namespace,
            keys,
            buffer,
            first_chunk=first_chunk,
            lease_ttl_ms=lease_ttl_ms,
            prompt_tokens=prompt_tokens,
            device=device,
            order=order,
            urgency=urgency,
            layer_stride=layer_stride,
            chunk_offsets=chunk_offsets,
            unchained=unchained,
        )
        retrieval = self.run(retrieving)
        delivery = SyncDelivery(self, retrieval.delivery) if retrieval.delivery is not None else None
        return SyncRetrieval(retrieval.found, delivery)

    def store(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        first_chunk: int,
        buffer: Buffer,
        *,
        durability: Durability = Durability.LOCAL,
        on_existing: OnExisting = OnExisting.SKIP,
        complete: bool = False,
        unchained: bool = False,
    ) -> SyncStoreSession:
        """See `QuireClient.store`."""
        session = self.run(
            self._client.store(
                namespace,
                keys,
                first_chunk,
                buffer,
                durability=durability,
                on_existing=on_existing,
                complete=complete,
                unchained=unchained,
            )
        )
        return SyncStoreSession(self, session)

    def reach(self) -> None:
        """See `QuireClient.reach`."""
        self.run(self._client.reach())

    def release(self, lookup: Lookup) -> bool:
        """Give the lease back; whether it was still pinned."""
        return self.run(self._client.release(lookup))

    def evict(self, namespace: Namespace, keys: ChunkKeys, *, keep_chunks: int = 0) -> int:
        """Drop chunks from the end of a prefix; how many were dropped."""
        return self.run(self._client.evict(namespace, keys, keep_chunks=keep_chunks))

    def retain(self, namespace: Namespace, keys: ChunkKeys, seconds: float) -> int:
        """See `QuireClient.retain`."""
        return self.run(self._client.retain(namespace, keys, seconds))

    def end_retention(self, namespace: Namespace, keys: ChunkKeys) -> bool:
        """See `QuireClient.end_retention`."""
        return self.run(self._client.end_retention(namespace, keys))

    def prefetch(self, namespace: Namespace, keys: ChunkKeys, *, within_s: float = 0.0) -> int:
        """See `QuireClient.prefetch`."""
        return self.run(self._client.prefetch(namespace, keys, within_s=within_s))

    def status(self) -> Sequence[Node]:
        """The members of the cluster."""
        return self.run(self._client.status())

    def _on_loop(self, work: Callable[[], Result]) -> Result:
        async def call() -> Result:
            return work()

        return self.run(call())


@dataclass(frozen=True, slots=True)
class SyncRetrieval:
    """A `Retrieval`, blocking."""

    found: Lookup
    delivery: SyncDelivery | None


class SyncDelivery:
    """A `Delivery`, blocking. `delivery`: the one that it is of."""

    def __init__(self, client: SyncClient, delivery: Delivery) -> None:
        self._client = client
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
            self._client.run(self.delivery.layer(layer))

    def arrival(self, layer: int) -> None:
        """Return when `layer` is complete, as `Delivery.arrival`."""
        if not self.delivery.arrived_ns[layer]:
            self._client.run(self.delivery.arrival(layer))

    def wanted(self, at_ns: Sequence[int]) -> None:
        """Report an engine's waits for layers, as `Delivery.wanted`."""
        self._client.post(lambda: self.delivery.wanted(at_ns))

    def summary(self) -> FetchSummary:
        """Wait for the end, as `Delivery.summary`."""
        return self._client.run(self.delivery.summary())

    def quiesced(self, timeout_s: float) -> None:
        """Return when every storage node has stopped using the buffer.

        Raises `DeadlineExceeded`: then do not reuse it.
        """
        self._client.run(self.delivery.quiesced(timeout_s), timeout_s)

    def cancel(self, timeout_s: float = 10.0) -> None:
        """Give up, as `Delivery.cancel`."""
        self._client.run(self.delivery.cancel(timeout_s), timeout_s)


class SyncStoreSession:
    """A `StoreSession`, blocking."""

    def __init__(self, client: SyncClient, session: StoreSession) -> None:
        self._client = client
        self._session = session

    @property
    def known_chunks(self) -> int:
        """How many chunks from the start were stored already."""
        return self._session.known_chunks

    @property
    def is_lent(self) -> bool:
        """Whether a storage node may still touch the buffer."""
        return self._session.is_lent

    def layer_produced(self, layer: int) -> None:
        """The layer of all chunks is in the buffer: storage nodes may read it now."""

        async def produced() -> None:
            self._session.layer_produced(layer)

        self._client.run(produced())

    def finish(self) -> StoreSummary:
        """Wait for the acknowledgement, as `StoreSession.finish`."""
        return self._client.run(self._session.finish())

    def quiesced(self, timeout_s: float) -> None:
        """Return when every storage node has stopped reading the buffer."""
        self._client.run(self._session.quiesced(timeout_s), timeout_s)

    def cancel(self, timeout_s: float = 10.0) -> None:
        """Give up, as `StoreSession.cancel`."""
        self._client.run(self._session.cancel(timeout_s), timeout_s)
