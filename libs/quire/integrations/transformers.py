"""Hugging Face transformers: a prefill that takes its prefix from Quire while the model runs.

`PrefixCache.prefill(input_ids)` looks the prompt up, starts the delivery, and runs the model on the tokens that are
not cached. Layer l of the model waits for layer l of the prefix only. As each layer's new keys and values appear they
are put where storage nodes read them. Whatever fails costs a recompute of what is missing, never a wrong token.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicLayer

from quire.client import Buffer, Lookup, SyncClient, SyncDelivery, SyncStoreSession
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import QuireError
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.telemetry import logger

_DTYPES: Final = {torch.float32: Dtype.FP32, torch.float16: Dtype.FP16, torch.bfloat16: Dtype.BF16}
_QUIESCE_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class LayerTimes:
    """One layer of one prefill, seconds since the request began: prefix arrived, model asked for it, model got it."""

    arrived_s: float = 0.0
    asked_s: float = 0.0
    got_s: float = 0.0

    @property
    def stall_s(self) -> float:
        return self.got_s - self.asked_s


@dataclass(slots=True)
class Prefill:
    """What a prefill made. `logits`: (1, computed tokens, vocabulary). `failure`: why cached tokens were not used."""

    logits: torch.Tensor
    cache: Cache
    matched_tokens: int
    reused_tokens: int
    computed_tokens: int
    bytes_delivered: int
    ttft_s: float
    layers: list[LayerTimes]
    failure: str = ""
    store: SyncStoreSession | None = field(default=None, repr=False)

    def wait_stored(self) -> int:
        """Wait for the acknowledgement of the new chunks; how many were stored. Raises what the store failed with."""
        return self.store.finish().stored_chunks if self.store else 0


class QuireLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer whose prefix arrives while the layers before it compute."""

    def __init__(
        self,
        index: int,
        prefix_tokens: int,
        arrive: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
        produced: Callable[[int, torch.Tensor, torch.Tensor], None],
    ) -> None:
        super().__init__()
        self._index = index
        self._prefix_tokens = prefix_tokens
        self._arrive = arrive
        self._produced = produced
        self._waiting = prefix_tokens > 0

    def get_seq_length(self) -> int:
        """Tokens cached, counting those on their way."""
        return self._prefix_tokens if self._waiting else int(super().get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new states behind the prefix, waiting for it at the first call."""
        if self._waiting:
            keys, values = self._arrive(self._index)
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = keys.to(self.device), values.to(self.device)
            self._waiting = False
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self._produced(self._index, keys, values)
        return keys, values


class PrefixCache:
    """Prefills of one model against one cluster. One prefill at a time.

    `model`: a decoder with `config.num_hidden_layers`, `num_key_value_heads` and `head_dim` (Llama and its kin),
    batch size 1. `weight_version`: by default the digest of the weights, so that other weights never share state.
    `device`: of which the cluster has a compute profile; then bandwidth goes by it, and what is faster computed is.
    """

    def __init__(
        self,
        model: Any,
        client: SyncClient,
        *,
        model_id: str,
        weight_version: str = "",
        chunk_tokens: int = 16,
        tenant_salt: bytes = b"",
        durability: Durability = Durability.LOCAL,
        order: DeliveryOrder = DeliveryOrder.LAYERWISE,
        device: str = "",
    ) -> None:
        self._model = model
        self._client = client
        self._durability = durability
        self._order = order
        self._device = device
        self._receive: Buffer | None = None
        self._send: Buffer | None = None
        layout = layout_of(model, chunk_tokens)
        self.namespace = Namespace(model_id, weight_version or weights_digest(model), layout, tenant_salt)

    def prefill(self, input_ids: torch.Tensor, *, reuse: bool = True, store: bool = True) -> Prefill:
        """Run the model on `input_ids` (1, T) and return its logits for the tokens that were computed."""
        started = time.monotonic()
        tokens = input_ids[0].tolist()
        keys = block_keys(self.namespace, tokens)
        found, failure = self._lookup(keys, len(tokens)) if reuse and len(keys) else (None, "")
        run = _Run(self, input_ids, keys, started)
        try:
            if found is not None and found.take_chunks:
                try:
                    return self._deliver_and_run(run, found, store=store)
                except QuireError as error:
                    failure = f"{error.code()}: {error}"
                    logger().warning("a delivery failed; the rest is recomputed", error=failure)
                    return run.execute(run.salvage(), store=store, failure=failure)
            return run.execute(0, store=store, failure=failure)
        finally:
            if found is not None:
                self._release(found)

    def close(self) -> None:
        """Free the transfer buffers that no storage node uses any more."""
        for buffer in (self._receive, self._send):
            if buffer is not None and not buffer.is_busy:
                self._client.free(buffer)
        self._receive = self._send = None

    def _lookup(self, keys: ChunkKeys, prompt_tokens: int) -> tuple[Lookup | None, str]:
        try:
            found = self._client.lookup(
                self.namespace, keys, prompt_tokens=prompt_tokens if self._device else 0, device=self._device
            )
            return found, ""
        except QuireError as error:
            logger().warning("look-up failed; everything is computed", error=str(error))
            return None, f"{error.code()}: {error}"

    def _deliver_and_run(self, run: _Run, found: Lookup, *, store: bool) -> Prefill:
        layout = self.namespace.layout
        buffer = self._receive = self._room(self._receive, layout.payload_bytes(found.take_chunks))
        run.attach(found, buffer, self._client.fetch(found, buffer, order=self._order))
        return run.execute(found.take_chunks, store=store)

    def _release(self, found: Lookup) -> None:
        try:
            self._client.release(found)
        except QuireError as error:
            logger().warning("a lease could not be released; it expires by itself", error=str(error))

    def _room(self, buffer: Buffer | None, length: int) -> Buffer:
        """`buffer` if large enough and free, else a new one. What a silent node may still write to is left."""
        if buffer is not None and buffer.length >= length and not buffer.is_busy:
            return buffer
        if buffer is not None and not buffer.is_busy:
            self._client.free(buffer)
        return self._client.allocate(length)

    def _begin_store(self, keys: ChunkKeys, first: int) -> SyncStoreSession | None:
        """A store for chunks from `first` on; None if there are none, or if the cluster cannot take them."""
        count = len(keys) - first
        if count <= 0:
            return None
        self._send = self._room(self._send, self.namespace.layout.payload_bytes(count))
        try:
            return self._client.store(self.namespace, keys, first, self._send, durability=self._durability)
        except QuireError as error:
            logger().warning("new chunks are not stored", error=str(error))
            return None


class _Run:
    """One prefill: where its prefix comes from, where its new chunks go, and its times."""

    def __init__(self, owner: PrefixCache, input_ids: torch.Tensor, keys: ChunkKeys, started: float) -> None:
        self._owner = owner
        self._ids = input_ids
        self._keys = keys
        self._started = started
        self._layout = owner.namespace.layout
        self._found: Lookup | None = None
        self._buffer: Buffer | None = None
        self._delivery: SyncDelivery | None = None
        self._session: SyncStoreSession | None = None
        self._first_new = 0
        self._prefix_tokens = 0
        self.times = [LayerTimes() for _ in range(self._layout.num_layers)]

    def attach(self, found: Lookup, buffer: Buffer, delivery: SyncDelivery) -> None:
        self._found, self._buffer, self._delivery = found, buffer, delivery

    def execute(self, prefix_chunks: int, *, store: bool, failure: str = "") -> Prefill:
        """Run the model behind a prefix of `prefix_chunks` chunks. At least one token is left for it to compute."""
        total = self._ids.shape[1]
        self._prefix_tokens = min(prefix_chunks * self._layout.chunk_tokens, total - 1)
        self._first_new = prefix_chunks
        self._session = self._owner._begin_store(self._keys, prefix_chunks) if store else None
        cache = Cache(
            layers=[
                QuireLayer(index, self._prefix_tokens, self._arrive, self._produced)
                for index in range(self._layout.num_layers)
            ]
        )
        try:
            with torch.inference_mode():
                logits = self._owner._model(
                    self._ids[:, self._prefix_tokens :], past_key_values=cache, use_cache=True
                ).logits
        except BaseException:
            self._cancel_store()
            raise
        ttft_s = time.monotonic() - self._started
        delivered = self._settle()
        matched = self._found.matched_tokens if self._found else 0
        return Prefill(
            logits,
            cache,
            matched,
            self._prefix_tokens,
            total - self._prefix_tokens,
            delivered,
            ttft_s,
            self.times,
            failure,
            self._session,
        )

    def _cancel_store(self) -> None:
        if self._session is None:
            return
        try:
            self._session.cancel()
        except QuireError as error:
            logger().warning("a cancelled store has not ended; its buffer is not used again", error=str(error))

    def salvage(self) -> int:
        """After a failed delivery: chunks from the first on that did arrive whole, once no node writes any more."""
        if self._delivery is None:
            return 0
        try:
            usable = self._delivery.summary().usable_chunks
            self._delivery.quiesced(_QUIESCE_TIMEOUT_S)
        except QuireError as error:
            logger().warning("nothing of the delivery can be used", error=str(error))
            return 0
        return usable

    def _settle(self) -> int:
        """Bytes delivered; waits until the buffer is free again."""
        if self._delivery is None:
            return 0
        try:
            summary = self._delivery.summary()
            self._delivery.quiesced(_QUIESCE_TIMEOUT_S)
        except QuireError as error:
            logger().warning("the delivery did not end cleanly", error=str(error))
            return 0
        for times, arrived_ns in zip(self.times, self._delivery.delivery.arrived_ns, strict=True):
            times.arrived_s = max(0.0, arrived_ns / 1e9 - self._started)
        return summary.bytes_moved

    def _arrive(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prefix in `layer`, (1, heads, tokens, head_dim) each; blocks until they are there."""
        assert self._found is not None and self._buffer is not None and self._delivery is not None
        times = self.times[layer]
        times.asked_s = time.monotonic() - self._started
        if not self._buffer_is_final():
            self._delivery.layer(layer)
        times.got_s = time.monotonic() - self._started
        block = self._block(self._buffer, layer, self._found.take_chunks)
        keys, values = (
            self._tokens_first(block[:, plane])[: self._prefix_tokens].transpose(0, 1).unsqueeze(0) for plane in (0, 1)
        )
        # A copy: the buffer is used again by the next request while this cache lives on.
        return keys.contiguous().clone(), values.contiguous().clone()

    def _buffer_is_final(self) -> bool:
        """After `salvage`: everything that will be used is there already."""
        assert self._buffer is not None
        return not self._buffer.is_busy

    def _produced(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the layer's new whole chunks where storage nodes read them. Only the prefill's own forward counts."""
        if self._session is None or keys.shape[-2] != self._ids.shape[1]:
            return
        buffer, size = self._owner._send, self._layout.chunk_tokens
        assert buffer is not None
        count = len(self._keys) - self._first_new
        block = self._block(buffer, layer, count)
        span = slice(self._first_new * size, len(self._keys) * size)
        for plane, states in enumerate((keys, values)):
            new = states[0, :, span].transpose(0, 1)
            block[:, plane] = new.reshape(count, size, self._layout.kv_heads, self._layout.head_dim)
        self._session.layer_produced(layer)

    def _block(self, buffer: Buffer, layer: int, chunks: int) -> torch.Tensor:
        """One layer of a transfer buffer as (chunks, K and V, tokens, heads, head_dim)."""
        layout = self._layout
        raw = torch.from_numpy(buffer.layers(layout.num_layers, chunks, layout.slice_bytes)[layer])
        dtype = next(torch_dtype for torch_dtype, dtype in _DTYPES.items() if dtype is layout.dtype)
        return raw.view(dtype).view(chunks, 2, layout.chunk_tokens, layout.kv_heads, layout.head_dim)

    def _tokens_first(self, plane: torch.Tensor) -> torch.Tensor:
        """(chunks, tokens, heads, head_dim) → (all tokens, heads, head_dim)."""
        return plane.reshape(-1, self._layout.kv_heads, self._layout.head_dim)


def layout_of(model: Any, chunk_tokens: int) -> KvLayout:
    """The chunk layout of a transformers model. Raises `LayoutInvalid` for dtypes that Quire does not know."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KvLayout(config.num_hidden_layers, chunk_tokens, heads, head_dim, _DTYPES[model.dtype])


def weights_digest(model: Any) -> str:
    """SHA-256 over the model's parameters, by name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
