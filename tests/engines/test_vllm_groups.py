"""Groups of layers as vLLM's own managers have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-engines` installs it")
import torch
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from quire.integrations.vllm.engine import groups_of
from quire.integrations.vllm.groups import Kind
from quire.model.errors import ConfigInvalid

SIZES: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
STATE: dict[str, Any] = {"block_size": 32, "shapes": ((4, 8),), "dtypes": (torch.float32,)}
SERVED = [
    (FullAttentionSpec(**SIZES), FullAttentionManager, Kind.FULL),
    (MLAAttentionSpec(**(SIZES | {"num_kv_heads": 1})), FullAttentionManager, Kind.FULL),
    (SlidingWindowSpec(**SIZES, sliding_window=100), SlidingWindowManager, Kind.WINDOW),
    (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=96), ChunkedLocalAttentionManager, Kind.CHUNKED),
    (MambaSpec(**STATE, mamba_cache_mode="align"), MambaManager, Kind.STATE),
]
REFUSED = [
    CrossAttentionSpec(**SIZES),
    MambaSpec(**STATE),
    MambaSpec(**STATE, mamba_cache_mode="align", num_speculative_blocks=1),
]


def _config(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"], enable_kv_transfer=True) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize(("spec", "manager", "kind"), SERVED)
def test_the_first_block_that_is_read_is_the_first_that_vllm_keeps(spec: Any, manager: Any, kind: Kind) -> None:
    """vLLM allocates blocks only for tokens that the next one reads; Quire loads the allocated blocks."""
    (group,) = groups_of(_config(spec))
    assert group.kind is kind and group.block_bytes == 2 * spec.page_size_bytes
    own = SimpleNamespace(sliding_window=100, extra_retained_tokens=0, attention_chunk_size=96)
    for tokens in range(32, 2048, 32):
        assert group.first_read(tokens) == manager.get_num_skipped_tokens(own, tokens) // 32


@pytest.mark.parametrize("spec", REFUSED)
def test_other_state_is_refused(spec: Any) -> None:
    with pytest.raises(ConfigInvalid, match=f"{type(spec).__name__}; QuireConnector serves"):
        groups_of(_config(FullAttentionSpec(**SIZES), spec))
