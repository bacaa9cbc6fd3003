"""The cache by tokens, without asyncio: arrays are copied in the caller's thread, behind the work of its stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.client.cache import PrefixDelivery
from quire.client.kv_arrays import check_layers, framework_of, pack_layer
from quire.model.durability import Durability
from quire.model.hashing import Namespace, block_keys
from quire.model.outcome import StoreSummary

if TYPE_CHECKING:
    from quire.client.blocking.client import Client
    from quire.client.blocking.transfers import SyncDelivery


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
        return CachedPrefix(self._client, self.namespace, tokens, framework_of(framework))

    def matched_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many tokens from the start of a prompt are stored. Raises as `Client.lookup`."""
        keys = block_keys(self.namespace, tokens)
        return self._client.lookup(self.namespace, keys, lease_ttl_ms=0).matched_tokens if len(keys) else 0

    def evict(self, tokens: Sequence[int]) -> int:
        """Drop a prompt's chunks that no other prompt extends; how many were dropped. Raises as `Client.evict`."""
        keys = block_keys(self.namespace, tokens)
        return self._client.evict(self.namespace, keys) if len(keys) else 0


class CachedPrefix(PrefixDelivery):
    """The stored beginning of a prompt, on its way. Made by `KvCache.get`.

    `chunks` and `tokens` are those of `PrefixDelivery`. Within the `with` block its views are of the memory that
    storage nodes write to. They stay readable after it; layers that have not arrived by then never do.
    """

    def __init__(self, client: Client, namespace: Namespace, tokens: Sequence[int], framework: str) -> None:
        super().__init__(client.asynchronous, namespace, framework)
        self._client = client
        self._keys = block_keys(namespace, tokens)
        self._arrivals: SyncDelivery | None = None

    def __enter__(self) -> CachedPrefix:
        self._begin()
        if not len(self._keys):
            return self
        try:
            self._found = self._client.lookup(self._namespace, self._keys)
            if self._found.take_chunks:  # memory only for what there is
                self._buffer = self._client.allocate(self._namespace.layout.payload_bytes(self.chunks))
                self._arrivals = self._client.fetch(self._found, self._buffer)
                self._delivery = self._arrivals.delivery
        except BaseException:
            self._client.run_or_post(self._end)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.run_or_post(self._end)

    def layer(self, layer: int) -> tuple[Any, ...]:
        """Return a layer's keys and values once all of it is here, each (chunks, chunk_tokens, kv_heads, head_dim).

        Raises:
            InvalidRequest: No such layer, or nothing of the prompt is stored.
            QuireError: Why the layer will never be here: compute the prompt.
        """
        self._check_layer(layer)
        assert self._arrivals is not None, "there are layers"
        self._arrivals.layer(layer)
        return self._views(layer)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the layers in order, each on its arrival; none if nothing is stored.

        Raises:
            QuireError: Why a layer will never be here: compute the prompt.
        """
        with contextlib.nullcontext(self) if self._entered else self:
            for layer in self._layers:
                yield self.layer(layer)
