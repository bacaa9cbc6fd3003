"""Keys and values by the tokens that they belong to: what most programs need of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from quire.client.kv_arrays import check_layers, framework_of, layer_views, on_current_streams, pack_layer
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest, QuireError
from quire.model.hashing import Namespace, block_keys
from quire.model.outcome import StoreSummary
from quire.telemetry import logger
from quire.transport.copying import to_its_end

if TYPE_CHECKING:
    from quire.client.client import AsyncClient
    from quire.client.delivery import Delivery
    from quire.client.lookup import Lookup
    from quire.client.memory.buffers import Buffer

_QUIET_TIMEOUT_S: Final = 10.0


class AsyncKvCache:
    """Keys and values of one model, by tokens. Made by `AsyncClient.cache`.

    `await cache.put(tokens, layers)` stores; `async with cache.get(tokens) as prefix` fetches, and an `async for` over
    `prefix` has each layer's keys and values on their arrival.

    `put` and `get` allocate and register memory for each call. An engine that knows its memory uses `AsyncClient.store`
    and `AsyncClient.retrieve` with buffers of its own.
    """

    def __init__(self, client: AsyncClient, namespace: Namespace) -> None:
        self._client = client
        self.namespace = namespace

    def put(
        self, tokens: Sequence[int], layers: Sequence[Any], *, durability: Durability | str = Durability.LOCAL
    ) -> Coroutine[Any, Any, StoreSummary]:
        """Store the state of a prompt's whole chunks; those that are stored already are not sent again. To be awaited.

        The arrays are copied in a thread, a layer at a time, while the layers before are on their way; those of a GPU
        behind the work of the stream that is current when this is called.

        Args:
            tokens: The prompt, (T,).
            layers: For each layer its keys and values, numpy arrays or torch tensors of (T, kv_heads, head_dim) in the
                layout's element type; with latent attention one array of (T, 1, head_dim). The first dimensions may be
                (chunks, chunk_tokens) in place of T, as `get` gives them.
            durability: What the acknowledgement means.

        Raises:
            InvalidRequest: Other shapes or element types; nothing is stored.
            QuireError: As `AsyncClient.store`.
        """
        check_layers(layers, self.namespace.layout)
        return self._put(tokens, layers, durability, on_current_streams(layers))

    async def _put(
        self,
        tokens: Sequence[int],
        layers: Sequence[Any],
        durability: Durability | str,
        in_order: Callable[[], AbstractContextManager[object]],
    ) -> StoreSummary:
        layout, loop = self.namespace.layout, asyncio.get_running_loop()
        keys = await asyncio.to_thread(block_keys, self.namespace, tokens)
        if not len(keys):
            return StoreSummary(0, 0, 0, ())
        buffer = self._client.allocate(layout.payload_bytes(len(keys)))
        try:
            rows = buffer.layers(layout.num_layers, len(keys), layout.slice_bytes)

            def copy(number: int) -> None:
                with in_order():
                    pack_layer(layers[number], rows[number], layout, number, len(tokens))

            await to_its_end(loop.run_in_executor(None, copy, 0))  # what is wrong with all of them shows at once
            async with await self._client.store(self.namespace, keys, 0, buffer, durability=durability) as store:
                store.layer_ready(0)
                for number in range(1, layout.num_layers):
                    await to_its_end(loop.run_in_executor(None, copy, number))
                    store.layer_ready(number)
            return await store.commit()
        finally:
            buffer.let_go()

    def get(self, tokens: Sequence[int], *, framework: str = "numpy") -> AsyncCachedPrefix:
        """Fetch the longest stored prefix of a prompt, layer by layer, within `async with`.

        Args:
            tokens: The prompt, (T,).
            framework: Whose arrays the layers are: "numpy" or "torch". numpy has the bits of bf16 as uint16 and of fp8
                as uint8.

        Raises:
            InvalidRequest: Another framework.
        """
        return AsyncCachedPrefix(self._client, self.namespace, tokens, framework_of(framework))

    async def matched_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many tokens from the start of a prompt are stored. Raises as `AsyncClient.lookup`."""
        keys = await asyncio.to_thread(block_keys, self.namespace, tokens)
        if not len(keys):
            return 0
        return (await self._client.lookup(self.namespace, keys, lease_ttl_ms=0)).matched_tokens

    async def evict(self, tokens: Sequence[int]) -> int:
        """Drop a prompt's chunks that no other prompt extends; how many were dropped. As `AsyncClient.evict`."""
        keys = await asyncio.to_thread(block_keys, self.namespace, tokens)
        return await self._client.evict(self.namespace, keys) if len(keys) else 0


class PrefixDelivery:
    """The delivery of a stored prefix: what `CachedPrefix` and `AsyncCachedPrefix` have in common."""

    def __init__(self, client: AsyncClient, namespace: Namespace, framework: str) -> None:
        self._asynchronous = client
        self._namespace = namespace
        self._framework = framework
        self._entered = False
        self._found: Lookup | None = None
        self._buffer: Buffer | None = None
        self._delivery: Delivery | None = None

    @property
    def chunks(self) -> int:
        """How many chunks are delivered. Raises `InvalidRequest` before it is fetched."""
        if not self._entered:
            raise InvalidRequest("not fetched yet: use `with cache.get(...)`, or `async with`", field="prefix")
        return self._found.take_chunks if self._found is not None else 0

    @property
    def tokens(self) -> int:
        """How many tokens from the start of the prompt need not be computed. Raises `InvalidRequest` as `chunks`."""
        return self.chunks * self._namespace.layout.chunk_tokens

    @property
    def _layers(self) -> range:
        """The layers that are delivered: none if nothing is stored."""
        return range(self._namespace.layout.num_layers if self.chunks else 0)

    def _begin(self) -> None:
        """Raise `InvalidRequest` for a prefix that was fetched before."""
        if self._entered:
            raise InvalidRequest("it was fetched before; call `get` again", field="prefix")
        self._entered = True

    def _check_layer(self, layer: int) -> None:
        """Check a layer's number. Raises `InvalidRequest`."""
        if layer not in self._layers or self._delivery is None:
            about = f"{self._namespace.layout.num_layers} layers of {self.tokens} cached tokens"
            raise InvalidRequest(f"{layer}; there are {about}", field="layer")

    def _views(self, layer: int) -> tuple[Any, ...]:
        """Return a layer that has arrived, each plane (chunks, chunk_tokens, kv_heads, head_dim)."""
        layout = self._namespace.layout
        assert self._buffer is not None, "a delivery has one"
        rows = self._buffer.layers(layout.num_layers, self.chunks, layout.slice_bytes)
        return layer_views(rows[layer], layout, self._framework)

    async def _end(self) -> None:
        """Stop the delivery, wait until no node writes, and give lease and memory back."""
        delivery = self._delivery
        try:
            if delivery is not None and delivery.is_lent:
                if all(delivery.arrived_ns):
                    await delivery.quiesced(_QUIET_TIMEOUT_S)
                else:
                    await delivery.cancel(_QUIET_TIMEOUT_S)
        except QuireError as error:
            logger().warning("a node may still write; its memory is freed when it has ended", error=str(error))
        finally:
            if self._buffer is not None:
                self._buffer.let_go()
        try:
            if self._found is not None:
                await self._asynchronous.release(self._found)
        except QuireError as error:
            logger().warning("a lease could not be released; it expires", error=str(error))


class AsyncCachedPrefix(PrefixDelivery):
    """The stored beginning of a prompt, on its way. Made by `AsyncKvCache.get`.

    `chunks` and `tokens` are those of `PrefixDelivery`. Within the `async with` block its views are of the memory that
    storage nodes write to. They stay readable after it; layers that have not arrived by then never do.
    """

    def __init__(self, client: AsyncClient, namespace: Namespace, tokens: Sequence[int], framework: str) -> None:
        super().__init__(client, namespace, framework)
        self._prompt = tokens

    async def __aenter__(self) -> AsyncCachedPrefix:
        self._begin()
        if self._framework == "torch":
            await asyncio.to_thread(import_module, "torch")  # which takes seconds, the first time
        keys = await asyncio.to_thread(block_keys, self._namespace, self._prompt)
        if not len(keys):
            return self
        try:
            self._found = await self._asynchronous.lookup(self._namespace, keys)
            if self._found.take_chunks:  # memory only for what there is
                self._buffer = self._asynchronous.allocate(self._namespace.layout.payload_bytes(self.chunks))
                self._delivery = await self._asynchronous.fetch(self._found, self._buffer)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end()

    async def layer(self, layer: int) -> tuple[Any, ...]:
        """Return a layer's keys and values once all of it is here, each (chunks, chunk_tokens, kv_heads, head_dim).

        Raises:
            InvalidRequest: No such layer, or nothing of the prompt is stored.
            QuireError: Why the layer will never be here: compute the prompt.
        """
        self._check_layer(layer)
        assert self._delivery is not None, "there are layers"
        await self._delivery.layer(layer)
        return self._views(layer)

    async def __aiter__(self) -> AsyncIterator[tuple[Any, ...]]:
        """Yield the layers in order, each on its arrival; none if nothing is stored.

        Raises:
            InvalidRequest: Before it is fetched.
            QuireError: Why a layer will never be here: compute the prompt.
        """
        for layer in self._layers:
            yield await self.layer(layer)
