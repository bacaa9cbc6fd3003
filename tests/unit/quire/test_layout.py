"""KV_L2TD arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.errors import LayoutInvalid
from quire.model.layout import Attention, Dtype, KvLayout

layouts = st.builds(
    KvLayout, st.integers(1, 128), st.integers(1, 256), st.integers(1, 16), st.integers(1, 256), st.sampled_from(Dtype)
)


def test_published_sizes() -> None:
    """Llama 3.1 8B: S = 64 KiB at G = 16 (ObjectCache); DeepSeek's MLA: 512 + 64 elements per token, one plane."""
    assert KvLayout(32, 16, 8, 128, Dtype.BF16).slice_bytes == 64 << 10
    assert KvLayout(32, 16, 8, 128, Dtype.FP8_E4M3).slice_bytes == 32 << 10
    assert KvLayout(32, 16, 32, 128, Dtype.FP32).slice_bytes == 512 << 10
    assert KvLayout(32, 16, 1, 128, Dtype.FP16).slice_bytes == 8 << 10
    assert KvLayout(61, 16, 1, 576, Dtype.BF16, Attention.MLA).slice_bytes == 16 * 576 * 2


@given(layouts)
def test_layer_ranges_tile_the_chunk(layout: KvLayout) -> None:
    """The ranges of layers 0 … L-1 follow each other without gap or overlap, and fill the chunk."""
    end = 0
    for layer in range(layout.num_layers):
        start, stop = layout.layer_range(layer)
        assert (start, stop) == (end, end + layout.slice_bytes)
        end = stop
    assert end == layout.chunk_bytes == layout.payload_bytes(1)


@pytest.mark.parametrize(
    "arguments,field",
    [
        ((0, 16, 8, 128), "num_layers"),
        ((32, 0, 8, 128), "chunk_tokens"),
        ((32, 16, 0, 128), "kv_heads"),
        ((32, 16, 8, 0), "head_dim"),
        ((5000, 16, 8, 128), "num_layers"),
        ((32, 16, 8, 10**9), "head_dim"),
        ((32, 8192, 1024, 16384), "layout"),
    ],
)
def test_zero_and_huge_layouts_name_the_field(arguments: tuple[int, int, int, int], field: str) -> None:
    with pytest.raises(LayoutInvalid, match=field):
        KvLayout(*arguments, Dtype.FP16)


def test_mla_has_one_head() -> None:
    with pytest.raises(LayoutInvalid, match="kv_heads"):
        KvLayout(61, 16, 8, 576, Dtype.BF16, Attention.MLA)
    with pytest.raises(LayoutInvalid, match="layer"):
        KvLayout(2, 16, 1, 8, Dtype.FP16).layer_range(2)
