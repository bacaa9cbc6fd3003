"""Keys and values by the tokens that they belong to: what most programs need of the client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from quire.client.kv_arrays import FRAMEWORKS, check_layers, layer_views, pack_layer
from quire.model.durability import Durability
from quire.model.errors import InvalidRequest, QuireError
from quire.model.hashing import Namespace, block_keys
from quire.model.outcome import StoreSummary
from quire.telemetry import logger

if TYPE_CHECKING:
    from quire.client.blocking.client import Client
    from quire.client.blocking.transfers import SyncDelivery
    from quire.client.lookup import Lookup
    from quire.client.memory.buffers import Buffer

_QUIET_TIMEOUT_S: Final = 10.0


class KvCache:
    """Keys and values of one model, by tokens. Made by `Client.cache`.

    `cache.put(tokens, layers)` stores; `with cache.get(tokens) as prefix` fetches, and a loop over `prefix` has each
    layer's keys and values on their arrival.

    `put` and `get` allocate and register memory for each call. An engine that knows its memory uses `Client.store` and
    `Client.retrieve` with buffers of its own.
    """

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self._client = client
        self.namespace = namespace

    def put(
        self, tokens: Sequence[int], layers: Sequence[Any], *, durability: Durability | str = Durability.LOCAL
    ) -> StoreSummary:
        """Store the state of a prompt's whole chunks; those that are stored already are not sent again.

        Args:
            tokens: The prompt, (T,).
            layers: For each layer its keys and values, numpy arrays or torch tensors of (T, kv_heads, head_dim) in the
                layout's element type; with latent attention one array of (T, 1, head_dim). The first dimensions may be
                (chunks, chunk_tokens) in place of T, as `get` gives them.
            durability: What the acknowledgement means.

        Raises:
            InvalidRequest: Other shapes or element types; nothing is stored.
            QuireError: As `Client.store`.
        """
        layout, keys = self.namespace.layout, block_keys(self.namespace, tokens)
        check_layers(layers, layout)
        if not len(keys):
            return StoreSummary(0, 0, 0, ())
        buffer = self._client.allocate(layout.payload_bytes(len(keys)))
        try:
            rows = buffer.layers(layout.num_layers, len(keys), layout.slice_bytes)
            pack_layer(layers[0], rows[0], layout, 0, len(tokens))  # what is wrong with all of them shows at once
            with self._client.store(self.namespace, keys, 0, buffer, durability=durability) as store:
                store.layer_ready(0)
                for number in range(1, layout.num_layers):
                    pack_layer(layers[number], rows[number], layout, number, len(tokens))
                    store.layer_ready(number)
            return store.commit()
        finally:
            self._client.let_go(buffer)

    def get(self, tokens: Sequence[int], *, framework: str = "numpy") -> CachedPrefix:
        """Fetch the longest stored prefix of a prompt, layer by layer: within `with`, or by a loop over it.

        Args:
            tokens: The prompt, (T,).
            framework: Whose arrays the layers are: "numpy" or "torch". numpy has the bits of bf16 as uint16 and of fp8
                as uint8.

        Raises:
            InvalidRequest: Another framework.
        """
        framework = str(framework).lower()
        if framework not in FRAMEWORKS:
            raise InvalidRequest(f"{framework!r}; there are {', '.join(FRAMEWORKS)}", field="framework")
        return CachedPrefix(self, tokens, framework)

    def matched_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many tokens from the start of a prompt are stored. Raises as `Client.lookup`."""
        keys = block_keys(self.namespace, tokens)
        return self._client.lookup(self.namespace, keys, lease_ttl_ms=0).matched_tokens if len(keys) else 0

    def evict(self, tokens: Sequence[int]) -> int:
        """Drop a prompt's chunks that no other prompt extends; how many were dropped. Raises as `Client.evict`."""
        keys = block_keys(self.namespace, tokens)
        return self._client.evict(self.namespace, keys) if len(keys) else 0


class CachedPrefix:
    """The stored beginning of a prompt, on its way. Made by `KvCache.get`.

    Within the `with` block its views are of the memory that storage nodes write to. They stay readable after it; layers
    that have not arrived by then never do.
    """

    def __init__(self, cache: KvCache, tokens: Sequence[int], framework: str) -> None:
        self._cache = cache
        self._client = cache._client
        self._keys = block_keys(cache.namespace, tokens)
        self._framework = framework
        self._entered = False
        self._found: Lookup | None = None
        self._buffer: Buffer | None = None
        self._delivery: SyncDelivery | None = None

    def __enter__(self) -> CachedPrefix:
        if self._entered:
            raise InvalidRequest("it was fetched before; call `get` again", field="prefix")
        self._entered = True
        if not len(self._keys):
            return self
        try:
            self._found = self._client.lookup(self._cache.namespace, self._keys)
            if self._found.take_chunks:  # memory only for what there is
                self._buffer = self._client.allocate(self._cache.namespace.layout.payload_bytes(self.chunks))
                self._delivery = self._client.fetch(self._found, self._buffer)
        except BaseException:
            self._client.run_or_post(self._end)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.run_or_post(self._end)

    @property
    def chunks(self) -> int:
        """How many chunks are delivered. Raises `InvalidRequest` before it is fetched."""
        if not self._entered:
            raise InvalidRequest("not fetched yet: use `with cache.get(...)`, or loop over it", field="prefix")
        return self._found.take_chunks if self._found is not None else 0

    @property
    def tokens(self) -> int:
        """How many tokens from the start of the prompt need not be computed. Raises `InvalidRequest` as `chunks`."""
        return self.chunks * self._cache.namespace.layout.chunk_tokens

    def layer(self, layer: int) -> tuple[Any, ...]:
        """Return a layer's keys and values once all of it is here, each (chunks, chunk_tokens, kv_heads, head_dim).

        Raises:
            InvalidRequest: No such layer, or nothing of the prompt is stored.
            QuireError: Why the layer will never be here: compute the prompt.
        """
        layout = self._cache.namespace.layout
        if not 0 <= layer < layout.num_layers or not self.chunks or self._delivery is None:
            about = f"{layout.num_layers} layers of {self.tokens} cached tokens"
            raise InvalidRequest(f"{layer}; there are {about}", field="layer")
        self._delivery.layer(layer)
        assert self._buffer is not None, "a delivery has one"
        rows = self._buffer.layers(layout.num_layers, self.chunks, layout.slice_bytes)
        return layer_views(rows[layer], layout, self._framework)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the layers in order, each on its arrival; none if nothing is stored.

        Raises:
            QuireError: Why a layer will never be here: compute the prompt.
        """
        with contextlib.nullcontext(self) if self._entered else self:
            for layer in range(self._cache.namespace.layout.num_layers if self.chunks else 0):
                yield self.layer(layer)

    async def _end(self) -> None:
        """Stop the delivery, wait until no node writes, and give lease and memory back."""
        delivery = self._delivery.delivery if self._delivery is not None else None
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
                await self._client.asynchronous.release(self._found)
        except QuireError as error:
            logger().warning("a lease could not be released; it expires", error=str(error))
