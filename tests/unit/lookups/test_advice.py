"""Fetch or compute: by Eq. 3, for every number of chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.index import OBJECT_TIER, Match, PlacedRun
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.nodes import Node, SchedulerInfo, StorageInfo
from quire.model.object_part import ObjectPart, ObjectSpeed
from quire.model.profile import Profiles, ttft_s
from quire.model.ranges import ChunkRange
from quire_server.core.advice import FetchAdvice, advise
from quire_server.core.placement import Reader, link_rates_of, object_part, readable_ranges

LLAMA = KvLayout(32, 16, 8, 128, Dtype.BF16)
_found = Profiles().find("Llama-3.1-8B", "a100-80gb")
assert _found is not None
PROFILE = _found


def _expected(prompt: int, chunks: int, rate: float, fixed_s: float) -> float:
    cached = min(chunks * 16, prompt - 1)
    window = float(PROFILE.window_s(prompt - cached, cached))
    transfer = chunks * LLAMA.slice_bytes / rate
    return float(ttft_s(transfer, window, 32)) + (fixed_s if chunks else 0)


@given(st.integers(1, 256), st.integers(0, 4096), st.integers(10**6, 10**11), st.floats(0, 0.1))
def test_nothing_else_would_be_faster(matched: int, rest: int, rate: int, fixed_s: float) -> None:
    prompt = matched * 16 + rest
    advice = advise(PROFILE, LLAMA, prompt, matched, rate, fixed_s)
    every = [_expected(prompt, chunks, rate, fixed_s) for chunks in range(matched + 1)]
    assert advice.ttft_s == pytest.approx(min(every))
    assert every[advice.chunks] == pytest.approx(min(every))
    assert advice.ttft_none_s == pytest.approx(every[0])
    assert advice.ttft_all_s == pytest.approx(every[-1])


def test_fast_links_take_all_slow_links_nothing_and_between_a_part() -> None:
    """64K, all but 512 tokens cached: at 1 TB/s all of it, at 10 MB/s none; somewhere between only the beginning."""
    matched = 4064
    taken = [advise(PROFILE, LLAMA, 65_536, matched, rate, 0.01).chunks for rate in (10**12, 6 * 10**8, 10**7)]
    assert taken[0] == matched
    assert 0 < taken[1] < matched
    assert taken[2] == 0


def test_long_prefixes_are_looked_at_in_steps() -> None:
    advice = advise(PROFILE, LLAMA, 1_000_000, 62_000, 10**11, 0.01)
    assert advice.chunks == 62_000


def test_what_links_have_left() -> None:
    """As the scheduler that leads reports it; a standby reports none."""
    nodes = [
        Node(node_id="storage-0", about=StorageInfo(link="rack-1")),
        Node(node_id="leads", about=SchedulerInfo(link_rates={"rack-1": 5 * 10**9, "rack-2": 7 * 10**9})),
        Node(node_id="standby", about=SchedulerInfo()),
    ]
    assert link_rates_of(nodes) == {"rack-1": 5 * 10**9, "rack-2": 7 * 10**9}
    assert not link_rates_of(nodes[:1])


def test_what_the_object_tier_alone_has_costs_its_requests_and_its_rate() -> None:
    """At 100 GB/s all of 8K is taken; not where the last half comes from a tier that takes ten seconds for it."""
    matched, link = 512, 10**11
    fast, slow = ObjectSpeed(1_000, 1, 10**11), ObjectSpeed(30_000, 40_000, 10**9)
    cold = ChunkRange("storage-0", 256, 256)

    def advised(speed: ObjectSpeed) -> FetchAdvice:
        objects = ObjectPart((cold,), {"storage-0": speed})
        return advise(PROFILE, LLAMA, matched * 16, matched, link, 0.0, objects)

    near, far = advised(fast), advised(slow)
    assert near.chunks == matched and far.chunks == 256
    assert far.ttft_all_s > 10 > near.ttft_all_s and far.ttft_none_s == near.ttft_none_s
    shared = ObjectPart((ChunkRange("a", 0, 128), ChunkRange("b", 128, 128)), {"a": slow, "b": slow})
    assert shared.seconds(256, 0) == ObjectPart((ChunkRange("a", 0, 128),), {"a": slow}).seconds(256, 0), "side by side"
    assert shared.chunks(100, 200) == 100 and float(shared.seconds(128, 0, first=128)) == 0.0


def test_what_no_live_node_is_listed_for_is_of_the_object_tier() -> None:
    speed = ObjectSpeed(1234, 567, 890_123_456).rounded()
    assert speed == ObjectSpeed(1000, 600, 900_000_000)
    live = {"a": Node(node_id="a", about=StorageInfo(worker_address=b"w", has_object_tier=True, object_speed=speed))}
    match = Match((PlacedRun(3, ("a", OBJECT_TIER)), PlacedRun(2, ("gone", OBJECT_TIER)), PlacedRun(4, (OBJECT_TIER,))))
    keys = ChunkKeys(b"".join(bytes([at]) * 32 for at in range(9)))
    ranges = readable_ranges(match, live, keys, Reader(1 << 20))
    part = object_part(match, live, ranges)
    assert part.chunks(0, 9) == 6 and part.chunks(0, 3) == 0 and part.speeds == {"a": speed}
