"""Compute windows of real vLLM: loads tell for how long the engine computes, and the scheduler learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.client import SyncClient
from quire_tools.local import LocalCluster
from tests.engines.engine import BLOCK, PROMPT, Engine, engine, until

WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK


def _observed(client: SyncClient) -> float:
    """Deliveries from which the scheduler has learned."""
    return max(node.stats.get("observed", 0) for node in client.status())


def _warm(quire: Engine) -> list[int]:
    """A prefix in Quire alone, on an engine that knows how long it computes."""
    for start in range(4):
        quire.tokens([start + 3, *PROMPT])
    answer, _ = quire.tokens(PROMPT)
    total = [0.0]

    def there() -> bool:
        total[0] += quire.figures().get("stored_blocks", 0)
        return total[0] >= 5 * (WHOLE // BLOCK)

    until(there, "all blocks stored")
    quire.forget()
    return answer


def _windows(quire: Engine) -> list[int | None]:
    """Record the windows of later loads, microseconds for each layer."""
    windows: list[int | None] = []
    loads = quire.worker._loads[0]
    window_us = loads._window_us

    def noted(plan: Any) -> int | None:
        windows.append(window_us(plan))
        return windows[-1]

    loads._window_us = noted
    return windows


def test_a_layerwise_load_has_the_window_of_its_step(tiny_model: Path, engine_cluster: LocalCluster) -> None:
    """A layer is due when the layers before that layer are computed; the scheduler learns from the engine's waits."""
    with (
        engine(tiny_model, engine_cluster.gateway_address, {"load": "layerwise"}) as quire,
        SyncClient(engine_cluster.gateway_address) as client,
    ):
        answer, windows = _warm(quire), _windows(quire)
        prompt = [*PROMPT, *([5] * 700)]  # so that the step computes for a while
        quire.tokens(prompt)
        assert windows and windows[0]
        quire.forget()
        assert quire.tokens(PROMPT)[0] == answer

        def learned() -> bool:
            quire.forget()
            quire.tokens(prompt)
            return _observed(client) > 0

        until(learned, "the scheduler hears of a load", 30)


def test_an_asynchronous_load_has_the_window_of_the_step_that_others_compute(
    tiny_model: Path, engine_cluster: LocalCluster
) -> None:
    """An idle engine sends no window, so that the load is as fast as the link."""
    with (
        engine(tiny_model, engine_cluster.gateway_address) as quire,
        SyncClient(engine_cluster.gateway_address) as client,
    ):
        answer, windows = _warm(quire), _windows(quire)
        assert quire.tokens(PROMPT)[0] == answer
        assert windows == [None]
        quire.forget()

        def learned() -> bool:
            quire.forget()
            answers = quire.batch([[9] * 1000, PROMPT], 16)
            assert answers[1][0][: len(answer)] == answer
            return any(windows) and _observed(client) > 0

        until(learned, "the scheduler hears of a load", 30)
