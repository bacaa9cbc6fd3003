"""The client for engines that have no loop: the asynchronous one, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy.typing as npt
import uvloop
from opentelemetry import context as otel

from quire.client.buffers import Buffer
from quire.client.client import Lookup, QuireClient
from quire.client.delivery import Delivery, FetchSummary
from quire.client.store import StoreSession, StoreSummary
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability, OnExisting
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node
from quire.wire.tls import Tls

Result = TypeVar("Result")


class SyncClient:
    """`with SyncClient("host:port") as client`. Methods as in `QuireClient`, blocking; safe from any thread."""

    def __init__(
        self, gateway_address: str, *, timeout_s: float = 60.0, tls: Tls | None = None, token: str = ""
    ) -> None:
        self._client = QuireClient(gateway_address, timeout_s=timeout_s, tls=tls, token=token)
        self._timeout_s = timeout_s
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-client", daemon=True)

    def __enter__(self) -> SyncClient:
        self._thread.start()
        self.run(self._client.start())
        return self

    def __exit__(self, *exc: object) -> None:
        self.run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._timeout_s)
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run on the client's loop, in the caller's trace, and wait."""
        current = otel.get_current()

        async def in_context() -> Result:
            token = otel.attach(current)
            try:
                return await coroutine
            finally:
                otel.detach(token)

        return asyncio.run_coroutine_threadsafe(in_context(), self._loop).result(self._timeout_s * 2)

    def allocate(self, length: int) -> Buffer:
        async def allocate() -> Buffer:
            return self._client.allocate(length)

        return self.run(allocate())

    def free(self, buffer: Buffer) -> None:
        """Close a buffer."""

        async def free() -> None:
            buffer.close()

        self.run(free())

    def lookup(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        *,
        lease_ttl_ms: int = 60_000,
        prompt_tokens: int = 0,
        device: str = "",
    ) -> Lookup:
        return self.run(
            self._client.lookup(namespace, keys, lease_ttl_ms=lease_ttl_ms, prompt_tokens=prompt_tokens, device=device)
        )

    def fetch(
        self,
        found: Lookup,
        buffer: Buffer,
        *,
        first_chunk: int = 0,
        chunk_count: int | None = None,
        order: DeliveryOrder = DeliveryOrder.AUTO,
        compute_window_us: int | None = None,
        layer_stride: int = 0,
        chunk_offsets: npt.ArrayLike | None = None,
    ) -> SyncDelivery:
        """As `QuireClient.fetch`."""
        fetching = self._client.fetch(
            found,
            buffer,
            first_chunk=first_chunk,
            chunk_count=chunk_count,
            order=order,
            compute_window_us=compute_window_us,
            layer_stride=layer_stride,
            chunk_offsets=chunk_offsets,
        )
        return SyncDelivery(self, self.run(fetching))

    def store(
        self,
        namespace: Namespace,
        keys: ChunkKeys,
        first_chunk: int,
        buffer: Buffer,
        *,
        durability: Durability = Durability.LOCAL,
        on_existing: OnExisting = OnExisting.SKIP,
    ) -> SyncStoreSession:
        session = self.run(
            self._client.store(namespace, keys, first_chunk, buffer, durability=durability, on_existing=on_existing)
        )
        return SyncStoreSession(self, session)

    def release(self, found: Lookup) -> bool:
        return self.run(self._client.release(found))

    def evict(self, namespace: Namespace, keys: ChunkKeys, *, keep_chunks: int = 0) -> int:
        return self.run(self._client.evict(namespace, keys, keep_chunks=keep_chunks))

    def status(self) -> Sequence[Node]:
        return self.run(self._client.status())


class SyncDelivery:
    """A `Delivery`, blocking."""

    def __init__(self, client: SyncClient, delivery: Delivery) -> None:
        self._client = client
        self.delivery = delivery

    def layer(self, layer: int) -> None:
        # The last layer ends the count of stalls, which the delivery's loop sends to the storage nodes.
        if not self.delivery.arrived_ns[layer] or layer == self.delivery.num_layers - 1:
            self._client.run(self.delivery.layer(layer))

    def summary(self) -> FetchSummary:
        return self._client.run(self.delivery.summary())

    def quiesced(self, timeout_s: float) -> None:
        self._client.run(self.delivery.quiesced(timeout_s))

    def cancel(self, timeout_s: float = 10.0) -> None:
        """Give up, as `Delivery.cancel`."""
        self._client.run(self.delivery.cancel(timeout_s))


class SyncStoreSession:
    """A `StoreSession`, blocking."""

    def __init__(self, client: SyncClient, session: StoreSession) -> None:
        self._client = client
        self._session = session

    @property
    def known_chunks(self) -> int:
        return self._session.known_chunks

    def layer_produced(self, layer: int) -> None:
        async def produced() -> None:
            self._session.layer_produced(layer)

        self._client.run(produced())

    def finish(self) -> StoreSummary:
        return self._client.run(self._session.finish())

    def cancel(self, timeout_s: float = 10.0) -> None:
        """Give up, as `StoreSession.cancel`."""
        self._client.run(self._session.cancel(timeout_s))
