"""Caches of quantized elements, with scales in the checkpoint or in the blocks. vLLM's engine core, a modelled model.

The build of vLLM here has no kernels for them on a CPU without AVX-512.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-engines` installs it")
from quire_tools.engines.models import make_model
from quire_tools.local import LocalCluster
from tests.engines.engine import OTHER, PROMPT
from tests.engines.modelled import latent_model, modelled_engine, until_stored

_CACHES = ["fp8", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("quantized") / "cluster"
    with LocalCluster(folder, arena_bytes=128 << 20, drive_bytes=128 << 20) as cluster:
        yield cluster.gateway_address


@pytest.mark.parametrize("cache", _CACHES)
@pytest.mark.parametrize("kind", ["heads", "latents"])
def test_tokens_are_those_without_quire(tmp_path: Path, gateway: str, kind: str, cache: str) -> None:
    """And other scales in the checkpoint are other blocks."""
    model = make_model(tmp_path, layers=2, kv_heads=1) if kind == "heads" else latent_model(tmp_path)
    with modelled_engine(model, "", kv_cache_dtype=cache) as alone:
        expected = [alone.tokens(prompt)[0] for prompt in (PROMPT, OTHER)]
    with modelled_engine(model, gateway, kv_cache_dtype=cache) as quire:
        unit = quire.scheduler._matching._unit
        assert quire.tokens(PROMPT) == (expected[0], 0)
        until_stored(quire, PROMPT)
        assert quire.tokens(OTHER) == (expected[1], 700 // unit * unit)
    with modelled_engine(model, gateway, kv_cache_dtype=cache) as another:
        assert another.tokens(PROMPT) == (expected[0], (len(PROMPT) - 1) // unit * unit)
    (model / "pytorch_model-scales.bin").write_bytes(b"0.5")
    with modelled_engine(model, "", kv_cache_dtype=cache) as alone:
        rescaled = alone.tokens(PROMPT)[0]
    with modelled_engine(model, gateway, kv_cache_dtype=cache) as quire:
        assert quire.tokens(PROMPT) == (rescaled, 0) and rescaled != expected[0]
