"""The namespace of an engine: everything that decides what bytes its KV blocks have for the same tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.integrations.objects import plain_layout
from quire.model.errors import ConfigInvalid, LayoutInvalid
from quire.model.hashing import Namespace
from quire.model.layout import Attention, Dtype, KvLayout

_DTYPES: Final = {
    "float32": Dtype.FP32,
    "float16": Dtype.FP16,
    "bfloat16": Dtype.BF16,
    "float8_e4m3fn": Dtype.FP8_E4M3,
    "float8_e5m2": Dtype.FP8_E5M2,
    "uint8": Dtype.FP8_E4M3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """How a worker's kernels keep a block, as the worker itself found it.

    `group`: the kind of its attention and its layers' names: one hash of vLLM's names blocks of every group. `kernel`:
    attention backend, with the instruction set where blocks are packed for it; `strides`: of a layer's tensor within a
    block, in elements, so that layouts of the same size differ; `slab_bytes`: of one block of one layer, as the worker
    has it, and `page_bytes`, as vLLM's description of the layer has it. `block_tokens`: tokens that a block spans, of
    which this rank keeps `kept_tokens`: with decode context parallelism `interleave` neighbours of every so many.
    `is_state`: it has no K and V, but the state of layers without attention.
    """

    group: str
    kernel: str
    dtype: str
    cache_dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    kept_tokens: int
    mla: bool
    slab_bytes: int
    page_bytes: int
    interleave: int = 1
    is_state: bool = False

    def layout(self) -> KvLayout:
        """Return a chunk's layout: that of K and V, or of a latent; for all others plain bytes, a row for each token.

        Raises `ConfigInvalid` for blocks of which the worker has only a part, and such as cannot be cut evenly.
        """
        if self.slab_bytes != self.page_bytes:
            raise ConfigInvalid(
                f"a block of a layer has {self.slab_bytes} bytes in the worker's tensor, and {self.page_bytes} by "
                "vLLM's description: the tensor has only a part of it",
                field="kv_cache_dtype",
            )
        layout = self._elements()
        if layout is None or layout.slice_bytes != self.slab_bytes:
            layout = self._rows_of_tokens() or plain_layout(self.layers, self.slab_bytes)
        if layout is None:
            raise ConfigInvalid(f"a block of {self.slab_bytes} bytes cannot be cut evenly", field="kv_cache_dtype")
        return layout

    def division(self) -> dict[str, Any]:
        """Name how the tokens of a block are divided among ranks; nothing where each rank keeps all of them."""
        if self.kept_tokens == self.block_tokens:
            return {}
        return {"context": [self.block_tokens // self.kept_tokens, self.interleave]}

    def _elements(self) -> KvLayout | None:
        dtype = _DTYPES.get(self.dtype)
        if dtype is None or self.is_state or self.kept_tokens != self.block_tokens:
            return None
        attention = Attention.MLA if self.mla else Attention.KV_HEADS
        heads = 1 if self.mla else self.kv_heads
        return KvLayout(self.layers, self.block_tokens, heads, self.head_dim, dtype, attention)

    def _rows_of_tokens(self) -> KvLayout | None:
        if self.is_state or self.slab_bytes % self.block_tokens:
            return None
        width = self.slab_bytes // self.block_tokens
        try:
            return KvLayout(self.layers, self.block_tokens, 1, width, Dtype.FP8_E4M3, Attention.MLA)
        except LayoutInvalid:  # wider than a row of a layout may be
            return None


def namespace_of(
    formats: BlockFormat,
    *,
    model: str,
    weights: str,
    engine: Mapping[str, Any],
    tenant_salt: bytes,
    shard: int,
    shards: int,
    context_ranks: int = 1,
) -> Namespace:
    """`engine`: what else makes blocks differ: versions, quantization, hash algorithm, ...; all of them are hashed.

    `context_ranks`: neighbouring shards among which the tokens of a block are divided.

    Raises `ConfigInvalid` for blocks that cannot be kept.
    """
    layout = formats.layout()
    facts = {
        "group": formats.group,
        "kernel": formats.kernel,
        "dtype": formats.dtype,
        "cache_dtype": formats.cache_dtype,
        "shape": list(formats.shape),
        "strides": list(formats.strides),
        **formats.division(),
        **engine,
    }
    form = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    # Every shard has all heads of a latent: shards differ only in the tokens that they keep.
    different = context_ranks if formats.mla else shards
    return Namespace(
        model_id=model,
        weight_version=f"{weights}/{form}",
        layout=layout,
        tenant_salt=tenant_salt,
        shard_index=shard % different,
        shard_count=different,
    )
