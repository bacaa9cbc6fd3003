"""Layerwise loads under vLLM's asynchronous scheduling: why QuireConnector refuses them.

vLLM's platform for the CPU has no asynchronous scheduling. Here its scheduler for that runs with a loop that plans, and
runs, each step before the scheduler gets the results of the step before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire_tools.local import LocalCluster
from tests.engines.engine import PROMPT, Engine, engine
from tests.engines.test_vllm import _caches, _Lost, _stored, expected  # noqa: F401

_SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"


def _run_ahead(quire: Engine) -> None:
    """Replace the engine's step: the scheduler gets the results of a step after the next one has run."""
    core = quire.llm.llm_engine.engine_core.engine_core
    scheduler, executor = core.scheduler, core.model_executor
    steps: list[tuple[Any, Any]] = []

    def step() -> tuple[Any, bool]:
        while len(steps) < 2 and scheduler.has_requests():
            plan = scheduler.schedule()
            result = executor.execute_model(plan, non_block=True).result()
            if result is None:
                result = executor.sample_tokens(scheduler.get_grammar_bitmask(plan))
            steps.append((plan, result))
        return (scheduler.update_from_output(*steps.pop(0)), True) if steps else ({}, False)

    core.step_fn = step


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_vllm_keeps_a_token_that_was_computed_behind_a_failed_load(
    tiny_model: Path,
    engine_cluster: LocalCluster,
    expected: dict[str, Any],  # noqa: F811
    policy: str,
) -> None:
    """The scheduler keeps the token of the step that it had planned already; or, with `fail`, the request has none."""
    settings = {"scheduler_cls": _SCHEDULER, "kv_load_failure_policy": policy}
    extra = {"load": "layerwise", "allow_failing": True}
    with engine(tiny_model, engine_cluster.gateway_address, extra, **settings) as quire:
        _run_ahead(quire)
        assert quire.tokens(PROMPT)[0] == expected["prompt"], "without a load"
        quire.forget()
        quire.tokens(PROMPT[:256])
        _stored(quire, 8)
        quire.forget()
        for tensor in _caches(quire):
            tensor.zero_()
        with _Lost(quire):
            answer, _ = quire.tokens(PROMPT)
        assert answer != expected["prompt"] and (answer == []) is (policy == "fail")
