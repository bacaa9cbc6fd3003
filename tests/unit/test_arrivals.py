"""Loads of `quire bench engines --arrivals`."""

from __future__ import annotations

import numpy as np
import pytest

from quire.model.errors import InvalidRequest
from quire_bench.engines.arrivals import Served, _report, loads


def test_every_rate_continues_the_same_conversations_with_turns_of_its_own() -> None:
    beginnings, turns = loads([1.0, 4.0], 200, 96, 32)
    assert all(len(beginning) == 64 for beginning in beginnings)
    for load in turns:
        assert [prompt[:64] for prompt in load.prompts] == beginnings
        assert {len(prompt) for prompt in load.prompts} == {96}
        assert float(np.diff(load.arrivals_s).mean()) == pytest.approx(1 / load.rate, rel=0.25)
    assert not {tuple(prompt) for prompt in turns[0].prompts} & {tuple(prompt) for prompt in turns[1].prompts}
    assert loads([1.0, 4.0], 200, 96, 32)[1] == turns, "every cache gets the same"


@pytest.mark.parametrize(("rates", "turn"), [([], 32), ([0.0], 32), ([1.0], 96), ([1.0], 0)])
def test_impossible_loads_are_refused(rates: list[float], turn: int) -> None:
    with pytest.raises(InvalidRequest):
        loads(rates, 4, 96, turn)


def test_other_tokens_of_quire_are_no_result() -> None:
    _, turns = loads([1.0], 1, 96, 32)

    def served(answer: int) -> list[Served]:
        return [Served(first_s=[0.1], between_s=[0.01], took_s=1.0, answers={"1.0-0": [answer]})]

    assert len(_report({"vLLM alone": served(1), "Quire": served(1)}, turns).rows) == 2
    with pytest.raises(InvalidRequest, match="other tokens"):
        _report({"vLLM alone": served(1), "Quire": served(2)}, turns)
