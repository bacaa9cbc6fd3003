"""Views of KV caches that vLLM itself makes, in each of its layouts; no GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-engines` installs it")
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from quire.integrations.vllm import QuireConnector
from quire.integrations.vllm.workers.blocks import KvBlocks
from quire.model.errors import ConfigInvalid

_BLOCKS, _LAYERS = 10, 4
_SPEC = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)


def _caches(layout: KVCacheLayout) -> dict[str, torch.Tensor]:
    page = _SPEC.page_size_bytes
    size, heads = page * _BLOCKS * _LAYERS, 1 if layout.is_block_compact else _SPEC.num_kv_heads
    outer = layout.is_block_outermost
    place = KVCacheTensor(
        size=size,
        layers=[f"layer.{number}" for number in range(_LAYERS)],
        layer_stride=page // heads if outer else page * _BLOCKS,
        block_stride=page * _LAYERS if outer else page // heads,
    )
    views = create_kv_cache_views(torch.zeros(size, dtype=torch.int8), _SPEC, _BLOCKS, layout, place)
    return {f"layer.{number}": view for number, view in enumerate(views)}


@pytest.mark.parametrize("layout", [layout for layout in KVCacheLayout if layout.is_block_compact])
def test_compact_blocks_are_served(layout: KVCacheLayout) -> None:
    blocks = KvBlocks(_caches(layout))
    assert blocks.slab_bytes == _SPEC.page_size_bytes and blocks.whole() is not None
    slabs = np.random.default_rng(1).integers(0, 256, (2, blocks.slab_bytes), dtype=np.uint8)
    staged = np.empty_like(slabs)
    blocks.put(2, [7, 3], slabs)
    blocks.take(2, [7, 3], staged)
    assert np.array_equal(staged, slabs)


def test_the_layout_that_vllm_takes_for_flash_attention_is_served() -> None:
    """The connector refused it: no CUDA GPU with FlashAttention could be served."""
    preferred = get_supported_kv_cache_layouts([FlashAttentionBackend])[0]
    assert preferred is KVCacheLayout.LBNHC and preferred.is_block_compact


@pytest.mark.parametrize("layout", [layout for layout in KVCacheLayout if not layout.is_block_compact])
def test_blocks_in_parts_are_refused(layout: KVCacheLayout) -> None:
    with pytest.raises(ConfigInvalid, match="VLLM_KV_CACHE_LAYOUT"):
        KvBlocks(_caches(layout))


def test_cuda_graphs_are_piecewise_for_layerwise_loads_alone() -> None:
    assert QuireConnector.requires_piecewise_for_cudagraph({"load": "layerwise"})
    assert not QuireConnector.requires_piecewise_for_cudagraph({})
