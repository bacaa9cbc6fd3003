"""Hugging Face transformers: a prefill that takes its prefix from Quire while the model runs.

`PrefixCache.prefill(input_ids)` looks the prompt up, starts the delivery, and runs the model on the tokens that are
not cached. Layer l of the model waits for layer l of the prefix only. As each layer's new keys and values appear they
are put where storage nodes read them. A failure costs a recompute of the missing chunks, never a wrong token.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import transformers
from transformers.cache_utils import Cache, DynamicLayer

from quire.client import Buffer, Client, Lookup, Prompt, SyncDelivery, SyncStoreSession
from quire.integrations.cost import Cost
from quire.integrations.weights import rope_depends_on_length
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import ConfigInvalid, InvalidRequest, QuireError
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.urgency import Urgency
from quire.telemetry import logger

_DTYPES: Final = {torch.float32: Dtype.FP32, torch.float16: Dtype.FP16, torch.bfloat16: Dtype.BF16}
_QUIESCE_TIMEOUT_S: Final = 10.0
_NAMES: Final = frozenset({"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"})
_ADAPTER_SETTINGS: Final = ("disable_adapters", "merged_adapters", "scaling", "use_dora", "fan_in_fan_out")
_READ_TENSORS: Final = 64
_READ_VALUES: Final = 16


@dataclass(slots=True)
class LayerTimes:
    """Times of one layer of one prefill, seconds since the request began: arrived, wanted, taken by the model."""

    arrived_s: float = 0.0
    asked_s: float = 0.0
    got_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """Time for which the model waited for the layer."""
        return self.got_s - self.asked_s


@dataclass(slots=True)
class Prefill:
    """Result of a prefill. `logits`: (1, computed tokens, vocabulary). `failure`: why cached tokens were not used."""

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
        return self.store.commit().stored_chunks if self.store else 0


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

    `model`: a decoder with `config.num_hidden_layers`, `num_key_value_heads` and `head_dim` (Llama and its kin), batch
    size 1. `weight_version`: by default a digest of the weights and the configuration, so that others never share
    state; weights that change in place have another one from the next prefill on. `device`: of which the cluster has a
    compute profile; then bandwidth follows it, and chunks that are computed faster are computed. Without a profile it
    follows the times of earlier prefills.

    Raises `ConfigInvalid` for models whose positions are scaled by the length of a prompt: a prefix has other keys
    then in each prompt.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        *,
        model_id: str,
        weight_version: str = "",
        chunk_tokens: int = 16,
        tenant_salt: bytes = b"",
        durability: Durability = Durability.LOCAL,
        order: DeliveryOrder = DeliveryOrder.AUTO,
        device: str = "",
    ) -> None:
        self._model = model
        self._client = client
        self._durability = durability
        self._order = order
        self._device = device
        self._receive: Buffer | None = None
        self._send: Buffer | None = None
        self._computing = Cost()
        self._names_weights = not weight_version
        if rope_depends_on_length(model.config.to_dict()):
            raise ConfigInvalid("positions are scaled by the length of a prompt: not supported", field="model")
        layout = layout_of(model, chunk_tokens)
        self._mark = weights_mark(model)
        self.namespace = Namespace(model_id, weight_version or contents_digest(model), layout, tenant_salt)

    def prefill(self, input_ids: torch.Tensor, *, reuse: bool = True, store: bool = True) -> Prefill:
        """Run the model on `input_ids` (1, T) and return its logits for the tokens that were computed.

        Raises:
            InvalidRequest: Another shape, as of a batch of several prompts, or no tokens.
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise InvalidRequest(f"{tuple(input_ids.shape)}; (1, T): one prompt of a token or more", field="input_ids")
        started = time.monotonic()
        self._name_weights()
        tokens = input_ids[0].tolist()
        keys = block_keys(self.namespace, tokens)
        match, failure = self._lookup(keys, len(tokens)) if reuse and len(keys) else (None, "")
        run = _Run(self, input_ids, keys, started)
        try:
            if match is not None and match.take_chunks:
                try:
                    return self._deliver_and_run(run, match, store=store)
                except QuireError as error:
                    failure = f"{error.code()}: {error}"
                    logger().warning("a delivery failed; the rest is recomputed", error=failure)
                    return run.execute(run.salvage(), store=store, failure=failure)
            return run.execute(0, store=store, failure=failure)
        finally:
            if match is not None:
                self._release(match)

    def close(self) -> None:
        """Free the transfer buffers that every storage node has stopped using."""
        for buffer in (self._receive, self._send):
            if buffer is not None and not buffer.is_busy:
                self._client.free(buffer)
        self._receive = self._send = None

    def _name_weights(self) -> None:
        """Rename the state of a model whose weights have changed in place."""
        mark = weights_mark(self._model) if self._names_weights else self._mark
        if mark != self._mark:
            self._mark = mark
            self.namespace = replace(self.namespace, weight_version=contents_digest(self._model))

    def _window_us(self, computed_tokens: int) -> int:
        """Return how long each layer computes (c_i of ObjectCache, §3.6), microseconds; 0 while that is not known."""
        seconds = self._computing.seconds(computed_tokens)
        return round((seconds or 0.0) / self.namespace.layout.num_layers * 1e6)

    def _lookup(self, keys: ChunkKeys, prompt_tokens: int) -> tuple[Lookup | None, str]:
        try:
            prompt = Prompt(prompt_tokens, self._device) if self._device else None
            match = self._client.lookup(self.namespace, keys, prompt=prompt)
            return match, ""
        except QuireError as error:
            logger().warning("look-up failed; everything is computed", error=str(error))
            return None, f"{error.code()}: {error}"

    def _deliver_and_run(self, run: _Run, match: Lookup, *, store: bool) -> Prefill:
        layout = self.namespace.layout
        buffer = self._receive = self._room(self._receive, layout.payload_bytes(match.take_chunks))
        computed = run.tokens - min(match.take_chunks * layout.chunk_tokens, run.tokens - 1)
        urgency = Urgency(compute_window_us=0 if self._device else self._window_us(computed))
        run.attach(match, buffer, self._client.fetch(match, buffer, order=self._order, urgency=urgency))
        return run.execute(match.take_chunks, store=store)

    def _release(self, match: Lookup) -> None:
        try:
            self._client.release(match)
        except QuireError as error:
            logger().warning("a lease could not be released; it expires", error=str(error))

    def _room(self, buffer: Buffer | None, length: int) -> Buffer:
        """Return `buffer` if it is large enough and free, else a new one.

        A buffer that a silent node may still write to is left.
        """
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
    """State of one prefill: where its prefix comes from, where its new chunks go, and its times."""

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

    @property
    def tokens(self) -> int:
        """Number of tokens in the prompt."""
        return int(self._ids.shape[1])

    def attach(self, match: Lookup, buffer: Buffer, delivery: SyncDelivery) -> None:
        self._found, self._buffer, self._delivery = match, buffer, delivery

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
        began_s = time.monotonic()
        try:
            with torch.inference_mode():
                logits = self._owner._model(
                    self._ids[:, self._prefix_tokens :], past_key_values=cache, use_cache=True
                ).logits
        except BaseException:
            self._cancel_store()
            raise
        ended_s = time.monotonic()
        ttft_s = ended_s - self._started
        stalled_s = sum(times.stall_s for times in self.times)
        self._owner._computing.add(total - self._prefix_tokens, ended_s - began_s - stalled_s)
        delivered = self._settle()
        matched = self._found.matched_tokens if self._found else 0
        return Prefill(
            logits,
            cache,
            matched_tokens=matched,
            reused_tokens=self._prefix_tokens,
            computed_tokens=total - self._prefix_tokens,
            bytes_delivered=delivered,
            ttft_s=ttft_s,
            layers=self.times,
            failure=failure,
            store=self._session,
        )

    def _cancel_store(self) -> None:
        if self._session is None:
            return
        try:
            self._session.cancel()
        except QuireError as error:
            logger().warning("a cancelled store has not ended; its buffer is not used again", error=str(error))

    def salvage(self) -> int:
        """Return how many chunks of a failed delivery, from the first on, arrived whole, once no node writes."""
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
        self._session.layer_ready(layer)

    def _block(self, buffer: Buffer, layer: int, chunks: int) -> torch.Tensor:
        """View one layer of a transfer buffer as (chunks, K and V, tokens, heads, head_dim)."""
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


def contents_digest(model: Any) -> str:
    """Digest what decides a model's states: parameters, buffers, active adapters and configuration."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NAMES}
    versions = ".".join(transformers.__version__.split(".")[:2])
    about = [versions, config, model.config._attn_implementation, _active_adapters(model)]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for name, tensor in sorted(_tensors(model).items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_mark(model: Any) -> tuple[Any, ...]:
    """Describe a model's weights, cheaply, in such a way that a change in place gives another description.

    torch counts writes to a tensor, except those by way of `.data`: to notice these, a few values of up to 64 tensors
    are part of the description.
    """
    tensors = list(_tensors(model).values())
    counts = tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
    read = [tensor.detach().flatten() for tensor in tensors[:: max(1, len(tensors) // _READ_TENSORS)] if tensor.numel()]
    values = [
        flat[:: max(1, flat.numel() // _READ_VALUES)].to(device=read[0].device, dtype=torch.float64) for flat in read
    ]
    return (*counts, _active_adapters(model), torch.cat(values).cpu().numpy().tobytes() if values else b"")


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _active_adapters(model: Any) -> str:
    """Describe which adapters compute (PEFT's, by module)."""
    adapters = [
        f"{name}: {module.active_adapters} {[getattr(module, about, None) for about in _ADAPTER_SETTINGS]}"
        for name, module in model.named_modules()
        if isinstance(getattr(module, "active_adapters", None), list | tuple | str)
    ]
    return "; ".join(adapters)
