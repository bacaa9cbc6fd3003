"""KV blocks in each order of axes that vLLM lays them out in: L layers, B blocks, H heads, N tokens, C content."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.integrations.vllm.workers.blocks import KvBlocks
from quire.model.errors import ConfigInvalid

_SIZES = {"L": 3, "B": 5, "H": 2, "N": 4, "C": 8}
_SERVED = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


def _layers(layout: str) -> dict[str, torch.Tensor]:
    """Views of shape (B, H, N, C), one for each layer, of one allocation in the order of `layout`; bfloat16."""
    count = int(np.prod(list(_SIZES.values())))
    memory = torch.arange(count, dtype=torch.int16).view(torch.bfloat16).reshape([_SIZES[axis] for axis in layout])
    logical = memory.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layer.{number}": logical[number] for number in range(_SIZES["L"])}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize("layout", _SERVED)
def test_blocks_are_copied_out_and_back(layout: str) -> None:
    layers = _layers(layout)
    originals = [_raw(layer).clone() for layer in layers.values()]
    blocks = KvBlocks(layers)
    assert blocks.slab_bytes == 2 * 2 * 4 * 8 and blocks.strides == tuple(layers["layer.0"].stride()[1:])
    staged = np.empty((2, blocks.slab_bytes), dtype=np.uint8)
    blocks.take(1, [4, 2], staged)
    layers["layer.1"][[4, 2]] = 0
    blocks.put(1, [4, 2], staged)
    assert all(torch.equal(_raw(layer), old) for layer, old in zip(layers.values(), originals, strict=True))
    blocks.put(1, [0], staged[:1])
    assert torch.equal(_raw(layers["layer.1"][0]), originals[1][4]), "a slab is the same wherever it lies"


@pytest.mark.parametrize("layout", _SERVED)
def test_slabs_lie_where_the_whole_says(layout: str) -> None:
    blocks = KvBlocks(_layers(layout))
    memory = blocks.whole()
    assert memory is not None
    raw, step, offsets = memory
    for layer in range(_SIZES["L"]):
        staged = np.empty((_SIZES["B"], blocks.slab_bytes), dtype=np.uint8)
        blocks.take(layer, range(_SIZES["B"]), staged)
        for block, offset in enumerate(offsets.tolist()):
            at = offset + layer * step
            assert raw[at : at + blocks.slab_bytes].numpy().tobytes() == staged[block].tobytes()


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_blocks_in_parts_are_refused_with_the_flag_that_helps(layout: str) -> None:
    with pytest.raises(ConfigInvalid, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        KvBlocks(_layers(layout))


def test_layers_in_different_orders_are_refused() -> None:
    """The namespace has one order of axes: the second layer would be read in the wrong one."""
    mixed = {"a": _layers("LBHNC")["layer.0"], "b": _layers("LBNHC")["layer.1"]}
    with pytest.raises(ConfigInvalid, match=r"layer b: .* differs from the first layer"):
        KvBlocks(mixed)


def test_elements_that_share_a_place_are_no_dense_block() -> None:
    """Span and number of elements are equal here."""
    shared = torch.zeros(8).as_strided((1, 2, 2, 2), (8, 1, 1, 5))
    with pytest.raises(ConfigInvalid, match="not one range"):
        KvBlocks({"a": shared})
