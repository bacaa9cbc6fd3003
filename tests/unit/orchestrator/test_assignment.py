"""Which engine is to prefill a prompt."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.assignment import TOKENS_MAX, Engine, EngineTable
from quire.model.errors import InvalidRequest
from quire.model.layout import Dtype, KvLayout
from quire.model.object_part import ObjectPart, ObjectSpeed
from quire.model.ranges import ChunkRange
from quire.wire.convert_assignment import assignment_from, assignment_to
from quire_orchestrator.core.assignment import CachedPrompt, Source, assign

LAYOUT = KvLayout(32, 16, 8, 128, Dtype.BF16)
RATE = 8_000.0


def _prompt(chunks: int = 0, *, tokens: int = 0, tip: bytes = b"tip", **about: Any) -> CachedPrompt:
    """Chunks on one node of the host `far`, or as `about` says."""
    source = {"a": Source(host="far", bytes_per_s=1_250_000_000)}
    about = {
        "ranges": (ChunkRange("a", 0, chunks),) if chunks else (),
        "sources": source,
        "fixed_s": 0.01,
        "host_bytes_per_s": 4e9,
        **about,
    }
    return CachedPrompt(tokens=tokens or 16 * max(chunks, 100) + 5, tip=tip, layout=LAYOUT, **about)


def _table(*engines: dict[str, Any]) -> EngineTable:
    return EngineTable.of(
        [Engine(**{"name": f"e{at}", "tokens_per_s": RATE, **each}) for at, each in enumerate(engines)]
    )


ENGINES = st.lists(
    st.fixed_dictionaries(
        {
            "host": st.sampled_from(["", "far", "other"]),
            "cached_tokens": st.integers(0, 5_000),
            "queued_tokens": st.sampled_from([0, 0, 10, 5_000, 200_000]),
            "tokens_per_s": st.sampled_from([100.0, 5_000.0, 20_000.0]),
        }
    ),
    min_size=1,
    max_size=12,
)


@given(ENGINES, st.integers(0, 256), st.integers(1, 300), st.randoms(use_true_random=False))
def test_no_choice_is_worse_than_a_random_one_or_depends_on_the_order(
    engines: list[dict[str, Any]], chunks: int, length: int, random: Any
) -> None:
    table, prompt = _table(*engines), _prompt(chunks, tokens=16 * max(chunks, length) + 1)
    found = assign(prompt, table)
    chosen = table.names.index(found.engine)
    assert found.ttft_s[chosen] <= float(np.mean(found.ttft_s)) * (1 + 1e-9)
    assert all(seconds > 0 for seconds in found.ttft_s)
    assert 0 <= found.take_chunks <= max(chunks, engines[chosen]["cached_tokens"] // 16)
    order = list(range(len(engines)))
    random.shuffle(order)
    shuffled = EngineTable.of([Engine(**{"name": f"e{at}", **engines[at]}) for at in order])
    assert assign(prompt, shuffled).engine == found.engine


def test_equal_engines_take_turns_by_the_prompt() -> None:
    """The same prompt goes to the same engine; others spread."""
    table = _table(*({} for _ in range(4)))
    prompts = [_prompt(tip=os.urandom(32)) for _ in range(800)]
    counts = Counter(assign(prompt, table).engine for prompt in prompts)
    assert all(120 < counts[name] < 280 for name in table.names), counts
    assert all(assign(prompt, table).engine == assign(prompt, table).engine for prompt in prompts[:20])


def test_a_busy_engine_gets_nothing_though_it_has_the_prompt() -> None:
    busy: dict[str, Any] = {"cached_tokens": 1_600, "tokens_per_s": 1e5}
    others: tuple[dict[str, Any], ...] = ({"cached_tokens": 80}, {}, {})
    found = assign(_prompt(), _table({**busy, "queued_tokens": 18_000}, *others))
    assert found.ttft_s[0] == min(found.ttft_s) and found.engine == "e1"
    found = assign(_prompt(), _table({**busy, "queued_tokens": 2_000}, *others))
    assert found.engine == "e0", "not busier by more than the prompt"


def test_the_engine_that_has_the_prompt_is_the_quickest() -> None:
    found = assign(_prompt(), _table({}, {"cached_tokens": 1_600}, {"cached_tokens": 800}))
    assert found.engine == "e1" and found.take_chunks == 100
    assert found.ttft_s[1] < found.ttft_s[2] < found.ttft_s[0]


@pytest.mark.parametrize("rate", [1e8, 1e9, 1e10])
def test_times_are_those_of_the_equation(rate: float) -> None:
    """One engine, one node, all or nothing is loaded (ObjectCache, Eq. 3)."""
    chunks, tokens = 64, 64 * 16 + 512
    prompt = _prompt(chunks, tokens=tokens, sources={"a": Source(host="", bytes_per_s=round(rate))})
    (seconds,) = assign(prompt, _table({})).ttft_s
    options = []
    for take in (0, 16, 32, 48, 64):
        layer = take * LAYOUT.slice_bytes / rate
        window = (tokens - 16 * take) / RATE / 32
        options.append(layer + 31 * max(layer, window) + window + (0.01 if take else 0.0))
    assert seconds == pytest.approx(min(options))


def test_a_node_on_the_engines_host_is_nearer_than_a_slow_link() -> None:
    prompt = _prompt(90, sources={"a": Source(host="far", bytes_per_s=100_000_000)})
    found = assign(prompt, _table({}, {"host": "far"}))
    assert found.engine == "e1" and found.ttft_s[1] < found.ttft_s[0]


def test_what_the_object_tier_alone_has_is_no_nearer_there() -> None:
    """A slow tier is read by neither; both compute."""
    cold = ObjectPart((ChunkRange("a", 0, 90),), {"a": ObjectSpeed(50_000, 10_000, 20_000_000)})
    found = assign(_prompt(90, objects=cold), _table({}, {"host": "far"}))
    assert found.take_chunks == 0 and found.ttft_s[0] == pytest.approx(found.ttft_s[1])
    warm = assign(_prompt(90), _table({}, {"host": "far"}))
    assert warm.take_chunks == 90


@pytest.mark.parametrize(
    "engines",
    [
        [],
        [Engine(name="", tokens_per_s=1.0)],
        [Engine(name="e", tokens_per_s=1.0)] * 2,
        [Engine(name="e", tokens_per_s=0.0)],
        [Engine(name="e", tokens_per_s=float("nan"))],
        [Engine(name="e", tokens_per_s=1e-300)],
        [Engine(name="e", tokens_per_s=1.0, queued_tokens=-1)],
        [Engine(name="e", tokens_per_s=1.0, queued_tokens=1 << 32)],
        [Engine(name="e", tokens_per_s=1.0, cached_tokens=1 << 40)],
        [Engine(name=f"e{at}", tokens_per_s=1.0) for at in range(4097)],
    ],
)
def test_engines_that_cannot_be(engines: list[Engine]) -> None:
    with pytest.raises(InvalidRequest, match="engines"):
        EngineTable.of(engines)


def test_the_longest_time_fits_its_message() -> None:
    most = TOKENS_MAX
    times = assign(_prompt(tokens=most), _table({"queued_tokens": most, "tokens_per_s": 1.0}))
    assert assignment_from(assignment_to(times)).ttft_s[0] == pytest.approx(2 * most, rel=0.1)


def test_columns_have_one_length() -> None:
    table = _table({}, {})
    with pytest.raises(InvalidRequest, match="lengths"):
        EngineTable(
            names=table.names,
            hosts=table.hosts[:1],
            cached_tokens=table.cached_tokens,
            queued_tokens=table.queued_tokens,
            tokens_per_s=table.tokens_per_s,
        )
