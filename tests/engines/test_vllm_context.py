"""Decode context parallelism: ranks keep different tokens of each block. vLLM's engine core, and a modelled model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-engines` installs it")
from quire.integrations.vllm import connector, naming
from quire_tools.engines.models import make_model
from quire_tools.engines.vllm import Engine
from quire_tools.local import LocalCluster
from tests.engines.engine import OTHER, PROMPT
from tests.engines.modelled import latent_model, modelled_engine, until_stored

_CASES = [(2, 1, 1), (2, 2, 1), (4, 2, 1), (4, 2, 16), (4, 4, 4)]
"""Ranks, ranks among which a block's tokens are divided, tokens that stay together."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with heads that neighbouring ranks share, and a model with latent attention."""
    return {
        "heads": make_model(tmp_path_factory.mktemp("heads"), layers=2, kv_heads=1),
        "latents": latent_model(tmp_path_factory.mktemp("latents")),
    }


@contextmanager
def _engine(
    model: Path, gateway: str, ranks: int, context: int, interleave: int, name: str = "any", **settings: Any
) -> Iterator[Engine]:
    with modelled_engine(
        model,
        gateway,
        name=name,
        tensor_parallel_size=ranks,
        decode_context_parallel_size=context,
        cp_kv_cache_interleave_size=interleave,
        **settings,
    ) as modelled:
        yield modelled


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("context") / "cluster"
    with LocalCluster(folder, arena_bytes=128 << 20, drive_bytes=128 << 20) as cluster:
        yield cluster.gateway_address


def _alone(model: Path, ranks: int, context: int, interleave: int) -> list[list[int]]:
    with _engine(model, "", ranks, context, interleave) as alone:
        return [alone.tokens(prompt)[0] for prompt in (PROMPT, OTHER)]


def _whole(quire: Engine, tokens: int) -> int:
    """Tokens of the blocks that a prompt fills."""
    config = quire.scheduler._vllm_config
    unit = config.cache_config.block_size * config.parallel_config.decode_context_parallel_size
    assert quire.scheduler._matching._unit == unit
    return int(tokens // unit * unit)


@pytest.mark.parametrize("kind", ["heads", "latents"])
@pytest.mark.parametrize(("ranks", "context", "interleave"), _CASES)
def test_tokens_are_those_without_a_cache(
    models: dict[str, Path], gateway: str, kind: str, ranks: int, context: int, interleave: int
) -> None:
    parallel = ranks, context, interleave
    expected = _alone(models[kind], *parallel)
    with _engine(models[kind], gateway, *parallel, name=f"{ranks} ranks") as quire:
        cached = _whole(quire, len(PROMPT) - 1)
        assert quire.tokens(PROMPT) == (expected[0], 0)
        until_stored(quire, PROMPT)
        assert quire.tokens(PROMPT) == (expected[0], cached)
        quire.forget()
        assert quire.tokens(OTHER) == (expected[1], _whole(quire, 700))
    with _engine(models[kind], gateway, *parallel, name=f"{ranks} ranks") as another:
        assert another.tokens(PROMPT) == (expected[0], cached)


def test_ranks_with_the_same_tokens_share_one_copy_of_a_latent(models: dict[str, Path], gateway: str) -> None:
    """The first and third of four ranks have the same half of each block, as the first of two has."""
    expected = _alone(models["latents"], 4, 2, 4)
    with _engine(models["latents"], gateway, 2, 2, 4) as pair:
        pair.tokens(PROMPT)
        until_stored(pair, PROMPT)
    with _engine(models["latents"], gateway, 4, 2, 4) as four:
        assert four.tokens(PROMPT) == (expected[0], _whole(four, len(PROMPT) - 1))


@pytest.mark.parametrize("named", [True, False])
def test_a_fault_put_back_tokens_divided_otherwise_are_other_blocks(
    models: dict[str, Path], gateway: str, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Engines that divide the tokens of a block otherwise share nothing; under one name they would get wrong tokens."""
    if not named:
        name = naming.namespace_of
        monkeypatch.setattr(
            connector, "namespace_of", lambda formats, **names: name(replace(formats, interleave=1), **names)
        )
    expected = _alone(models["latents"], 2, 2, 8)
    with _engine(models["latents"], gateway, 2, 2, 2) as first:
        first.tokens(PROMPT)
        until_stored(first, PROMPT)
    with _engine(models["latents"], gateway, 2, 2, 8) as second:
        answer, cached = second.tokens(PROMPT)
        assert (answer == expected[0]) is named and (cached == 0) is named


def test_an_interleaving_that_vllm_settles_in_its_workers_names_blocks(models: dict[str, Path], gateway: str) -> None:
    """Only workers know which of the two flags counts: under the scheduler's name blocks were taken for another's."""
    expected = _alone(models["latents"], 2, 2, 4)
    for interleave, is_shared in ((1, False), (2, False), (4, True)):
        settings = {"dcp_kv_cache_interleave_size": interleave}
        with _engine(models["latents"], gateway, 2, 2, 1, name=f"settled {interleave}", **settings) as quire:
            quire.tokens(PROMPT)
            until_stored(quire, PROMPT)
        with _engine(
            models["latents"], gateway, 2, 2, 1, f"settled {interleave}", dcp_kv_cache_interleave_size=4
        ) as four:
            answer, cached = four.tokens(PROMPT)
            assert answer == expected[0] and (cached > 0) is is_shared


def test_a_fault_put_back_ranks_keep_other_tokens_of_a_latent(
    models: dict[str, Path], gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: all ranks share one copy of a latent, as without context parallelism."""
    name = naming.namespace_of
    monkeypatch.setattr(
        connector, "namespace_of", lambda *values, **names: name(*values, **{**names, "context_ranks": 1})
    )
    expected = _alone(models["latents"], 2, 2, 16)
    with _engine(models["latents"], gateway, 2, 2, 16) as quire:
        assert quire.tokens(PROMPT) == (expected[0], 0)
        until_stored(quire, PROMPT)
        assert quire.tokens(PROMPT)[0] != expected[0]
