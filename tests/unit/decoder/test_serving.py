"""The paper's serving experiment, small enough to follow by hand; and its figures, on a short trace."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from quire_bench.papers.latentbox import tables as paper
from quire_bench.papers.latentbox.serving import (
    Fetch,
    Found,
    Images,
    Nothing,
    Serving,
    SetUp,
    floor_ms,
    look_ups,
    paper_setups,
    quire_setup,
    serve,
    sized,
    timed,
)
from quire_tools.plan.image_trace import ImageTrace, generate

SMALL = Serving(nodes=1, node_bytes=1000, window=100, warmup=0, window_s=1.0, transfer_s=0.0, around_s=0.0)
EXACT = Fetch(0.1, 0.0)


def _trace(times: list[float], objects: list[int]) -> ImageTrace:
    count = max(objects) + 1
    return ImageTrace(np.array(times), np.array(objects), np.full(count, 100), np.full(count, 20))


def _seconds(times: list[float], objects: list[int], setup: SetUp) -> list[float]:
    served = serve(_trace(times, objects), setup, replace(SMALL, window=len(times), window_s=times[-1] - times[0]))
    return [round(float(each), 6) for each in served.seconds]


def test_one_device_takes_one_latent_at_a_time() -> None:
    """Two fetches at once are decoded one behind the other; a request for one of them waits with it."""
    everything = SetUp(lambda _, __: Nothing(), fetch=EXACT)
    assert _seconds([0, 0, 0.01, 1.0], [0, 1, 0, 2], everything) == [0.131, 0.162, 0.121, 0.131]


def test_a_fetch_holds_no_device() -> None:
    """A latent that is there passes one that is still on its way."""

    class Second(Nothing):
        def request(self, key: int, image_bytes: int, latent_bytes: int) -> Found:
            return Found.LATENT if key == 1 else Found.MISS

    setup = SetUp(lambda _, __: Second(), fetch=EXACT)
    assert _seconds([0, 0.02, 1.0], [0, 1, 2], setup) == [0.131, 0.031, 0.131]


def test_an_image_store_decodes_nothing() -> None:
    store = SetUp(lambda size, _: Images(size), decodes=False, fetch=EXACT)
    assert _seconds([0, 0.05, 0.5, 1.0], [0, 0, 0, 1], store) == [0.1, 0.0, 0.0, 0.1]


def test_spillover_takes_the_peak_off() -> None:
    """Ten latents at once: with θ 2 the other node takes its share of the fuller one's."""
    trace = _trace([0.0] * 10 + [10.0], list(range(11)))
    setup = SetUp(lambda _, __: Nothing(), fetch=Fetch(0.0, 0.0))
    two = replace(SMALL, nodes=2, window=11, window_s=10.0, theta=2)
    with_it, without = serve(trace, setup, two), serve(trace, setup, replace(two, theta=math.inf))
    fuller = int(np.bincount(np.random.default_rng(2).integers(0, 2, 11)[:10]).max())
    assert without.spilled == 0 < with_it.spilled
    assert without.seconds.max() == pytest.approx(fuller * two.decode_s)
    assert with_it.seconds.max() < without.seconds.max()


@pytest.mark.slow
def test_the_floor_is_below_every_cache() -> None:
    """And where nothing is ever asked for again, nothing can be saved."""
    trace = sized(generate(3_000, seed=3))
    serving = Serving(window=15_000, warmup=30_000, window_s=1e6)
    for share in (0.01, 0.05):
        size = int(trace.working_set_bytes * share)
        sized_so = replace(serving, node_bytes=size // serving.nodes)
        floor = floor_ms(trace, sized_so, size)
        for name, setup in (paper_setups() | {"Quire": quire_setup(history=1 << 13)}).items():
            if setup.decodes:
                assert floor < serve(trace, replace(setup, fetch=Fetch(0.13, 0.0)), sized_so).mean_ms, name
    once = _trace([0.0, 1.0, 2.0], [0, 1, 2])
    assert floor_ms(once, replace(serving, window=3, warmup=0), 10**12) == pytest.approx(176.0)


@pytest.mark.slow
def test_the_decoders_cache_is_worth_having() -> None:
    """Below LatentBox's and below an image store, at the same bytes and on the same trace."""
    trace = sized(generate(6_000, seed=1))
    serving = Serving(window=30_000, warmup=60_000, window_s=1e6)
    serving = replace(serving, node_bytes=int(trace.working_set_bytes * 0.02 / serving.nodes))
    setups = paper_setups() | {"Quire": quire_setup(history=1 << 14)}
    means = {name: serve(trace, setups[name], serving).mean_ms for name in ("ImgStore", "LB-Adaptive", "Quire")}
    assert means["Quire"] < 0.97 * means["LB-Adaptive"], means
    assert means["Quire"] < 0.85 * means["ImgStore"], means


def test_a_trace_that_changes() -> None:
    """The image that goes viral and the new model's images are there, in order of time."""
    changed = paper.changing(generate(2_000, seed=4), seed=4)
    assert np.all(np.diff(changed.times) > 0)
    count = len(changed)
    third_day = changed.objects[count // 2 : 3 * count // 4]
    assert np.bincount(third_day).max() > 0.09 * len(third_day)
    late = changed.objects[2 * count // 3 :]
    assert 0.4 < float((late >= 2_000).mean()) < 0.6
    assert not (changed.objects[: 2 * count // 3] >= 2_000).any()


def test_where_images_are_found_does_not_depend_on_when() -> None:
    trace = sized(generate(1_000, seed=2))
    serving = Serving(window=2_000, warmup=2_000, window_s=60.0)
    setup = paper_setups()["LB-Adaptive"]
    found = look_ups(trace, setup, serving)
    fast = timed(trace, setup, replace(serving, window_s=6.0), found)
    assert serve(trace, setup, serving).found == found == fast.found
    assert fast.queued_s.sum() > timed(trace, setup, serving, found).queued_s.sum()
