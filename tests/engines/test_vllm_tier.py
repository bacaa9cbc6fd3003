"""Quire as a tier of vLLM's own offloading: real vLLM, its manager and its region; greedy tokens are vLLM's alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import prometheus_client
import pytest

from quire_tools.engines.models import make_model
from quire_tools.engines.vllm import any_vllm
from quire_tools.local import LocalCluster
from tests.engines.engine import BLOCK, OTHER, PROMPT, engine, settle, tier_of, tiered_engine
from tests.polling import until

WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK


@pytest.fixture(scope="session")
def alone(tiny_model: Path) -> dict[str, list[int]]:
    with engine(tiny_model) as vllm:
        return {"prompt": vllm.tokens(PROMPT)[0], "other": vllm.tokens(OTHER)[0]}


@pytest.mark.parametrize("zero_copy", [False, True])
def test_an_engine_finds_what_another_one_offloaded(
    tiny_model: Path, engine_cluster: LocalCluster, alone: dict[str, list[int]], zero_copy: bool
) -> None:
    with tiered_engine(tiny_model, engine_cluster.gateway_address, zero_copy=zero_copy) as first:
        assert first.tokens(PROMPT) == (alone["prompt"], 0)
        settle(first)
    with tiered_engine(tiny_model, engine_cluster.gateway_address, zero_copy=zero_copy) as second:
        assert second.tokens(PROMPT) == (alone["prompt"], WHOLE)
        assert second.tokens(OTHER) == (alone["other"], 700 // BLOCK * BLOCK)


def test_a_job_that_its_loop_has_left_ends(
    tiny_model: Path, engine_cluster: LocalCluster, alone: dict[str, list[int]]
) -> None:
    """An engine that stops closes the loop; Python ends what ran there, in whatever thread collects it."""

    class Job(NamedTuple):
        job_id: int = 7
        keys: tuple[bytes, ...] = (b"key",)
        chunk_ids: tuple[int, ...] = (0,)
        is_promotion: bool = False

    async def never(parts: Any) -> list[int]:
        return await asyncio.Event().wait() and []

    with tiered_engine(tiny_model, engine_cluster.gateway_address) as tiered:
        tier = tier_of(tiered)
        running = tier._run(Job(), [b"key"], never)
        loop = asyncio.new_event_loop()
        loop.call_soon(running.send, None)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        running.close()
        assert [(each.job_id, each.success) for each in tier.get_finished_jobs()] == [(7, False)]


def test_the_state_of_a_hybrid_model_comes_back(
    tmp_path_factory: pytest.TempPathFactory, engine_cluster: LocalCluster
) -> None:
    """Every second layer sees 96 tokens: two groups of layers, each with its own chunks."""
    model = make_model(tmp_path_factory.mktemp("hybrid"), family="gemma3")
    hybrid = {"disable_hybrid_kv_cache_manager": False}
    with any_vllm(model, None, **hybrid) as vllm:
        expected, _ = vllm.tokens(PROMPT)
    for cached in (0, WHOLE):
        with tiered_engine(model, engine_cluster.gateway_address, engine_settings=hybrid) as tiered:
            core: Any = tiered.llm.llm_engine.engine_core
            assert len(core.engine_core.scheduler.kv_cache_config.kv_cache_groups) == 2
            assert tiered.tokens(PROMPT) == (expected, cached)
            settle(tiered)


def test_what_the_memory_tier_has_no_room_for_is_in_quire(
    tiny_model: Path, engine_cluster: LocalCluster, alone: dict[str, list[int]]
) -> None:
    """It has room for one of these prompts; vLLM's own cache is forgotten."""
    with tiered_engine(tiny_model, engine_cluster.gateway_address, rows=WHOLE // BLOCK + 4) as tiered:
        for prompt in (PROMPT, [*range(2, 202), *PROMPT[200:]], PROMPT):
            tiered.tokens(prompt)
            settle(tiered)
            tiered.forget()
        assert tiered.tokens(PROMPT) == (alone["prompt"], WHOLE)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_node_killed_in_the_middle_costs_a_recompute(
    tiny_model: Path, engine_cluster: LocalCluster, alone: dict[str, list[int]], zero_copy: bool
) -> None:
    with tiered_engine(tiny_model, engine_cluster.gateway_address) as first:
        first.tokens(PROMPT)
        settle(first)
    params: dict[str, Any] = {"zero_copy": zero_copy, "timeout_s": 3.0}
    with tiered_engine(tiny_model, engine_cluster.gateway_address, **params) as second:
        tier, killed, counted = tier_of(second), list[int](), set[str]()
        submit, count = tier.submit_load, tier._count

        def noted(name: str, chunks: int) -> None:
            counted.update([name] if chunks else [])
            count(name, chunks)

        tier._count = noted

        def kill_first(job: Any) -> None:
            if not killed:
                killed.append(engine_cluster.pid("storage-0"))
                os.kill(killed[0], signal.SIGKILL)
            submit(job)

        tier.submit_load = kill_first
        assert second.tokens(PROMPT)[0] == alone["prompt"]
        assert killed and "vllm:quire_tier_failed_loads" in counted


def test_a_node_that_stands_still_costs_the_timeout(
    tiny_model: Path, engine_cluster: LocalCluster, alone: dict[str, list[int]]
) -> None:
    with tiered_engine(tiny_model, engine_cluster.gateway_address) as first:
        first.tokens(PROMPT)
        settle(first)
    with tiered_engine(tiny_model, engine_cluster.gateway_address, timeout_s=2.0) as second:
        tier, node = tier_of(second), engine_cluster.pid("storage-0")
        submit = tier.submit_load

        def stop_first(job: Any) -> None:
            os.kill(node, signal.SIGSTOP)
            submit(job)

        tier.submit_load = stop_first
        try:
            began = time.monotonic()
            assert second.tokens(PROMPT) == (alone["prompt"], 0)
            assert time.monotonic() - began < 30
        finally:
            os.kill(node, signal.SIGCONT)


def _counted(name: str) -> float:
    """Read a counter of vLLM's Prometheus page."""
    metrics = prometheus_client.REGISTRY.collect()
    return sum(sample.value for metric in metrics for sample in metric.samples if sample.name == f"vllm:{name}_total")


def test_a_gateway_that_is_away_costs_nothing_but_the_hits(
    tiny_model: Path, tmp_path: Path, alone: dict[str, list[int]]
) -> None:
    with (
        LocalCluster(tmp_path / "c", arena_bytes=128 << 20, drive_bytes=128 << 20) as cluster,
        tiered_engine(
            tiny_model,
            cluster.gateway_address,
            lookup_timeout_s=0.5,
            away_s=0.2,
            engine_settings={"disable_log_stats": False},
        ) as tiered,
    ):
        cluster.kill("gateway")
        assert tiered.tokens(PROMPT) == (alone["prompt"], 0)
        assert _counted("quire_tier_failed_lookups") > 0, "a miss that was none is counted"
        tiered.forget()
        assert tiered.tokens(PROMPT)[0] == alone["prompt"]
        cluster.restart("gateway")
        until(lambda: not tier_of(tiered)._absence, "it is asked again")
        assert tiered.tokens(OTHER)[0] == alone["other"]
        settle(tiered)
        tiered.forget()
