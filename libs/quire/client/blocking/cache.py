"""The cache by tokens, without asyncio."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from quire.client.blocking.loop import SyncLoop
from quire.client.cache import AsyncCachedPrefix, AsyncKvCache
from quire.model.durability import Durability
from quire.model.hashing import Namespace
from quire.model.outcome import StoreSummary


class KvCache:
    """Keys and values of one model, by tokens. Made by `Client.cache`.

    `cache.put(tokens, layers)` stores; `with cache.get(tokens) as prefix` fetches, and a loop over `prefix` has each
    layer's keys and values on their arrival.

    `put` and `get` allocate and register memory for each call. An engine that knows its memory uses `Client.store` and
    `Client.retrieve` with buffers of its own.
    """

    def __init__(self, loop: SyncLoop, cache: AsyncKvCache) -> None:
        self._loop = loop
        self._cache = cache

    @property
    def namespace(self) -> Namespace:
        """Namespace of the chunks."""
        return self._cache.namespace

    def put(
        self, tokens: Sequence[int], layers: Sequence[Any], *, durability: Durability | str = Durability.LOCAL
    ) -> StoreSummary:
        """Store the state of a prompt's whole chunks, as `AsyncKvCache.put`.

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
        return self._loop.run(self._cache.put(tokens, layers, durability=durability))

    def get(self, tokens: Sequence[int], *, framework: str = "numpy") -> CachedPrefix:
        """Fetch the longest stored prefix of a prompt, layer by layer: within `with`, or by a loop over it.

        Args:
            tokens: The prompt, (T,).
            framework: Whose arrays the layers are: "numpy" or "torch". numpy has the bits of bf16 as uint16 and of fp8
                as uint8.

        Raises:
            InvalidRequest: Another framework.
        """
        return CachedPrefix(self._loop, self._cache.get(tokens, framework=framework))

    def matched_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many tokens from the start of a prompt are stored. Raises as `Client.lookup`."""
        return self._loop.run(self._cache.matched_tokens(tokens))

    def evict(self, tokens: Sequence[int]) -> int:
        """Drop a prompt's chunks that no other prompt extends; how many were dropped. Raises as `Client.evict`."""
        return self._loop.run(self._cache.evict(tokens))


class CachedPrefix:
    """The stored beginning of a prompt, on its way. Made by `KvCache.get`.

    Within the `with` block its views are of the memory that storage nodes write to. They stay readable after it; layers
    that have not arrived by then never do.
    """

    def __init__(self, loop: SyncLoop, prefix: AsyncCachedPrefix) -> None:
        self._loop = loop
        self._prefix = prefix
        self._entered = False

    def __enter__(self) -> CachedPrefix:
        self._entered = True
        self._loop.run(self._prefix.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.run_or_post(self._prefix.__aexit__)

    @property
    def chunks(self) -> int:
        """How many chunks are delivered. Raises `InvalidRequest` before it is fetched."""
        return self._prefix.chunks

    @property
    def tokens(self) -> int:
        """How many tokens from the start of the prompt need not be computed. Raises `InvalidRequest` as `chunks`."""
        return self._prefix.tokens

    def layer(self, layer: int) -> tuple[Any, ...]:
        """Return a layer's keys and values once all of it is here, each (chunks, chunk_tokens, kv_heads, head_dim).

        Raises:
            InvalidRequest: No such layer, or nothing of the prompt is stored.
            QuireError: Why the layer will never be here: compute the prompt.
        """
        return self._loop.run(self._prefix.layer(layer))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the layers in order, each on its arrival; none if nothing is stored.

        Raises:
            QuireError: Why a layer will never be here: compute the prompt.
        """
        with contextlib.nullcontext(self) if self._entered else self:
            for layer in range(self._prefix.num_layers):
                yield self.layer(layer)
