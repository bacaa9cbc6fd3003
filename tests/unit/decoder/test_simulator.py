"""The trace generator's statistics, the simulator against hand counts, the cost model against the paper."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.model.errors import InvalidRequest
from quire_bench.papers.latentbox.simulator import (
    belady_miss_ratio,
    simulate,
    simulate_image_store,
)
from quire_decoder.core.cache_tiers import SieveTier
from quire_decoder.core.dual_cache import Tuning
from quire_tools.plan.image_trace import PUBLISHED, ImageTrace, generate, read_trace, statistics
from quire_tools.plan.images import ImagePrices, Scenario, cumulative


def test_the_generated_trace_is_like_the_published_one() -> None:
    """Every published statistic within a quarter of itself (the shares within six points)."""
    trace = generate(20_000, seed=3)
    found = statistics(trace)
    assert set(found) == set(PUBLISHED)
    for name, value in PUBLISHED.items():
        assert math.isclose(found[name], value, rel_tol=0.3, abs_tol=0.08 if value < 1 else 0.0), name
    assert np.all(np.diff(trace.times) >= 0)
    again = generate(20_000, seed=3)
    assert np.array_equal(trace.objects, again.objects), "the same seed, the same trace"


def _trace(objects: list[int], image: int = 100, latent: int = 20) -> ImageTrace:
    count = max(objects) + 1
    return ImageTrace(
        np.arange(len(objects), dtype=np.float64),
        np.array(objects),
        np.full(count, image),
        np.full(count, latent),
    )


FIXED = Tuning(window=10**9, promote_hits=2, adaptive=False)


def test_latencies_by_hand() -> None:
    """Two objects that are asked for in turn: misses, latent hits, the promoting one, image hits."""
    trace = _trace([0, 1] * 5)
    result = simulate(trace, 1000, 0.5, FIXED, decode_s=0.04, fetch_s=0.14)
    assert result.latencies[:2].tolist() == pytest.approx([0.18, 0.18])
    assert result.latencies[2:6].tolist() == pytest.approx([0.04] * 4)
    assert result.latencies[6:].tolist() == [0.0] * 4
    images = simulate(trace, 1000, 1.0, FIXED)
    assert images.latencies.tolist() == pytest.approx([0.18, 0.18] + [0.0] * 8)
    latents = simulate(trace, 1000, 0.0, FIXED)
    assert latents.latencies.tolist() == pytest.approx([0.18, 0.18] + [0.04] * 8)
    assert simulate_image_store(trace, 1000).tolist() == pytest.approx([0.14, 0.14] + [0.0] * 8)


def test_the_split_as_published_runs_to_a_bound() -> None:
    """Eq. 2 with tails that are larger in the larger tier: the reason why they are divided by their tier's share."""
    trace = generate(4000, seed=1)
    capacity = int(trace.working_set_bytes * 0.01)
    tuning = Tuning(window=500, step=0.02)
    published = simulate(trace, capacity, 0.5, replace(tuning, normalised=False))
    ours = simulate(trace, capacity, 0.5, tuning)
    (_, published_alpha, _), (_, our_alpha, _) = published.windows[-1], ours.windows[-1]
    assert min(published_alpha - tuning.alpha_min, tuning.alpha_max - published_alpha) < 2 * tuning.step
    assert 0.2 < our_alpha < 0.8 and ours.mean_ms < 0.95 * published.mean_ms


def test_the_split_is_worth_having() -> None:
    """On a generated trace the tuned cache is below both single-format caches, and near the best fixed split."""
    trace = generate(4000, seed=1)
    capacity = int(trace.working_set_bytes * 0.02)
    tuning = Tuning(window=500, step=0.02)
    fixed = Tuning(window=500, adaptive=False)
    ours = simulate(trace, capacity, 0.5, tuning)
    assert ours.mean_ms < simulate(trace, capacity, 1.0, fixed).mean_ms
    assert ours.mean_ms < simulate(trace, capacity, 0.0, fixed).mean_ms
    best = min(simulate(trace, capacity, alpha, fixed).mean_ms for alpha in (0.3, 0.4, 0.5, 0.6, 0.7))
    assert ours.mean_ms < 1.02 * best
    sieve = simulate(trace, capacity, 1.0, fixed, make_tier=SieveTier)
    assert sieve.mean_ms < simulate(trace, capacity, 1.0, fixed).mean_ms, "of a single format SIEVE keeps more"
    total = ours.total
    assert total.requests == len(trace)
    assert total.full_misses >= len(np.unique(trace.objects)), "each object is fetched at least once"
    assert len(ours.windows) == len(trace) // 500


def test_belady_is_a_floor() -> None:
    trace = generate(1000, seed=2)
    capacity = int(trace.working_set_bytes * 0.05)
    floor = belady_miss_ratio(trace, capacity, trace.image_bytes)
    lru = simulate(trace, capacity, 1.0, FIXED).total
    assert len(np.unique(trace.objects)) / len(trace) <= floor <= lru.full_misses / lru.requests


def test_traces_from_files(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("time_s,object_id,image_bytes\n3,b,10\n1,a,20\n2,b,10\n")
    trace = read_trace(file)
    assert trace.times.tolist() == [1, 2, 3]
    assert trace.objects.tolist() == [0, 1, 1]
    assert trace.image_bytes.tolist() == [20, 10]
    for text in (
        "",
        "time_s,object_id\n",
        "time_s\n1\n",
        "time_s,object_id\nx,a\n",
        "time_s,object_id,image_bytes\n1,a,-5\n",
    ):
        file.write_text(text)
        with pytest.raises(InvalidRequest):
            read_trace(file)
    with pytest.raises(InvalidRequest):
        read_trace(tmp_path / "nothing")
    with pytest.raises(InvalidRequest):
        generate(10)


def test_costs_are_near_the_papers() -> None:
    """Over the trace: latents on an RTX 5090 at 0.40 of the image store, on an H100 at 0.91; by 2050, at falling
    prices, a quarter."""
    scenario, gpus = Scenario(), {"H100": 2.5, "RTX 5090": 0.69}
    today = cumulative(scenario, ImagePrices("constant", 0, 0), scenario.months, gpus)
    assert today["latents, RTX 5090"] / today["ImgStore"] == pytest.approx(0.40, abs=0.03)
    assert today["latents, H100"] / today["ImgStore"] == pytest.approx(0.91, abs=0.05)
    later = cumulative(scenario, ImagePrices("falling", 0.2, 0.1), scenario.months + 12 * 24, gpus)
    assert 1 - later["latents, RTX 5090"] / later["ImgStore"] == pytest.approx(0.75, abs=0.03)
    assert scenario.stored(scenario.months) == pytest.approx(scenario.images)
    assert all(scenario.stored(month) < scenario.stored(month + 1) for month in range(100))


@pytest.mark.parametrize("field", ["image_mb", "images", "months"])
def test_scenarios_that_make_no_sense(field: str) -> None:
    with pytest.raises(InvalidRequest):
        Scenario(**{field: 0})
    with pytest.raises(InvalidRequest, match=field):
        Scenario(**{field: -1})
