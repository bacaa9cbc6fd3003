"""Loads of real vLLM: they tell when layers are needed, the scheduler learns from them, and small ones come at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.client import Client
from quire.model.descriptor import DeliveryOrder
from quire.model.urgency import Urgency
from quire_tools.local import LocalCluster
from tests.engines.engine import BLOCK, PROMPT, Engine, engine
from tests.polling import until

WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK


def _observed(client: Client) -> float:
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


def _urgencies(quire: Engine) -> list[Urgency]:
    """Record when later loads are needed."""
    urgencies: list[Urgency] = []
    loads = quire.worker._loads[0]
    urgency = loads._urgency

    def noted(plan: Any) -> Urgency:
        urgencies.append(urgency(plan))
        return urgencies[-1]

    loads._urgency = noted
    return urgencies


def _orders(quire: Engine) -> list[DeliveryOrder]:
    """Record the order in which later loads are delivered."""
    orders: list[DeliveryOrder] = []
    loads = quire.worker._loads[0]
    report = loads._report

    def noted(load: Any, blocks: set[int]) -> None:
        orders.extend(outcome.order for outcome in loads._client.run(load.delivery.summary()).outcomes)
        report(load, blocks)

    loads._report = noted
    return orders


@pytest.fixture
def layer_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster that delivers also small loads layer by layer."""
    settings = {"QUIRE_STORAGE_THETA_BYTES": "0"}
    with LocalCluster(tmp_path / "cluster", arena_bytes=128 << 20, drive_bytes=128 << 20, settings=settings) as cluster:
        yield cluster


def test_a_layerwise_load_has_the_window_of_its_step(tiny_model: Path, engine_cluster: LocalCluster) -> None:
    """A layer is due when the layers before that layer are computed; the scheduler learns from the engine's waits."""
    with (
        engine(tiny_model, engine_cluster.gateway_address, {"load": "layerwise"}) as quire,
        Client(engine_cluster.gateway_address) as client,
    ):
        answer, urgencies = _warm(quire), _urgencies(quire)
        prompt = [*PROMPT, *([5] * 700)]  # so that the step computes for a while
        quire.tokens(prompt)
        assert urgencies and urgencies[0].compute_window_us and not urgencies[0].first_layer_us
        quire.forget()
        assert quire.tokens(PROMPT)[0] == answer

        def learned() -> bool:
            quire.forget()
            quire.tokens(prompt)
            return _observed(client) > 0

        until(learned, "the scheduler hears of a load", timeout_s=30)


def test_an_asynchronous_load_has_the_window_of_the_step_that_others_compute(
    tiny_model: Path, layer_cluster: LocalCluster
) -> None:
    """An idle engine says nothing of when it needs a load, so that the load is as fast as the link."""
    with (
        engine(tiny_model, layer_cluster.gateway_address) as quire,
        Client(layer_cluster.gateway_address) as client,
    ):
        answer, urgencies = _warm(quire), _urgencies(quire)
        assert quire.tokens(PROMPT)[0] == answer
        assert urgencies == [Urgency()]
        quire.forget()

        def learned() -> bool:
            quire.forget()
            answers = quire.batch([[9] * 1000, PROMPT], 16)
            assert answers[1][0][: len(answer)] == answer
            return any(urgency.first_layer_us for urgency in urgencies) and _observed(client) > 0

        until(learned, "the scheduler hears of a load", timeout_s=30)


def test_small_loads_are_delivered_chunk_by_chunk(tiny_model: Path, engine_cluster: LocalCluster) -> None:
    """The cluster's threshold decides (Eq. 2 of ObjectCache), for loads of an engine too."""
    with engine(tiny_model, engine_cluster.gateway_address) as quire:
        answer, orders = _warm(quire), _orders(quire)
        assert quire.tokens(PROMPT)[0] == answer
        assert orders == [DeliveryOrder.CHUNKWISE]
