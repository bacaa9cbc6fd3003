"""LatentBox's cache, which the decoder's is compared with: one tier per object, bounded, tuned by its marginal hits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_decoder.core.cache_tiers import LruTier, SieveTier, Tier
from quire_decoder.core.dual_cache import Costs, Counters, DualCache, Outcome, Tuning, gradient

TIERS: list[Callable[[int, float], Tier[int]]] = [LruTier, SieveTier]


@pytest.mark.parametrize("make", TIERS)
@settings(max_examples=80)
@given(
    events=st.lists(st.tuples(st.sampled_from("hhhirz"), st.integers(0, 12), st.integers(1, 40)), max_size=120),
    tail_share=st.floats(0.05, 0.5),
)
def test_tiers_are_bounded_and_consistent(
    make: Callable[[int, float], Tier[int]], events: list[tuple[str, int, int]], tail_share: float
) -> None:
    """Against a plain dictionary: what left is not here, what is here has not left, bytes add up, capacity holds."""
    tier, sizes = make(100, tail_share), {}
    for kind, key, size in events:
        gone: list[int] = []
        if kind == "h":
            assert (tier.hit(key) is not None) == (key in sizes)
        elif kind == "i" and key not in sizes:
            sizes[key] = size
            gone = tier.insert(key, size)
        elif kind == "r":
            assert tier.remove(key) == sizes.pop(key, 0)
        elif kind == "z":
            gone = tier.resize(size * 5)
        for each in gone:
            del sizes[each]
        assert tier.used_bytes == sum(sizes.values()) <= tier.capacity_bytes
        assert len(tier) == len(sizes)
        assert all(each in tier for each in sizes)


def test_lru_order_and_the_tail() -> None:
    tier: LruTier[str] = LruTier(100, 0.2)
    for name in "abcdefghij":
        assert tier.insert(name, 10) == []
    assert tier.hit("a") is True, "the least recently used are in the tail"
    assert tier.hit("a") is False, "and back in the main segment when they are used"
    assert tier.hit("j") is False
    assert tier.insert("k", 10) == ["b"]
    assert tier.hit("b") is None


def test_sieve_spares_what_was_used() -> None:
    """One pass of things that are used once does not push out what is used often."""
    sieve, lru = SieveTier[int](1000, 0.1), LruTier[int](1000, 0.1)
    kept = {}
    for tier in (sieve, lru):
        for key in range(50):
            tier.insert(key, 10)
            tier.hit(key)
        for key in range(1000, 1200):
            tier.insert(key, 10)
        kept[tier] = sum(key in tier for key in range(50))
    assert kept[sieve] > 30 > kept[lru]


def test_sieve_misses_as_often_as_a_plain_one() -> None:
    """Against the published algorithm, written down as it stands there; without a tail."""
    rng = random.Random(9)
    requests = [int(rng.paretovariate(0.8)) % 3000 for _ in range(20_000)]
    tier, misses = SieveTier[int](200, 1e-18), 0
    for key in requests:
        if tier.hit(key) is None:
            misses += 1
            tier.insert(key, 1)
    assert misses == _plain_sieve(requests, 200)


def _plain_sieve(requests: list[int], capacity: int) -> int:
    queue: list[int] = []  # old to new
    visited: set[int] = set()
    hand = misses = 0
    for key in requests:
        if key in queue:
            visited.add(key)
            continue
        misses += 1
        if len(queue) >= capacity:
            hand %= len(queue)
            while queue[hand] in visited:
                visited.discard(queue[hand])
                hand = (hand + 1) % len(queue)
            del queue[hand]
            if hand == len(queue):
                hand = 0
        queue.append(key)
    return misses


def _cache(**changes: object) -> DualCache[int]:
    values: dict[str, object] = {"capacity_bytes": 1000, "alpha": 0.5, "tuning": Tuning(window=10**9, promote_hits=3)}
    return DualCache(**(values | changes))  # type: ignore[arg-type]


def test_the_life_of_an_object() -> None:
    """Miss, latent, the h-th latent hit promotes, image."""
    cache = _cache()
    assert cache.look_up(1) is Outcome.MISS
    cache.fetched(1, 20)
    assert [cache.look_up(1) for _ in range(3)] == [Outcome.LATENT, Outcome.LATENT, Outcome.PROMOTE]
    assert cache.promote(1, 100)
    assert 1 in cache.images
    assert 1 not in cache.latents
    assert cache.look_up(1) is Outcome.IMAGE
    assert cache.gone == []
    cache.forget(1)
    assert cache.gone == [1]
    assert cache.look_up(1) is Outcome.MISS
    assert cache.total.requests == 6


def test_an_image_that_is_too_large_stays_a_latent() -> None:
    cache = _cache()
    cache.look_up(1)
    cache.fetched(1, 20)
    assert not cache.promote(1, 600)
    assert 1 in cache.latents
    assert cache.gone == []


@settings(max_examples=60)
@given(
    st.sampled_from(TIERS),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(20, 200)), max_size=400),
    st.integers(1, 20),
)
def test_one_tier_per_object_and_nothing_unaccounted(
    make: Callable[[int, float], Tier[int]], requests: list[tuple[int, int, int]], window: int
) -> None:
    cache: DualCache[int] = DualCache(
        1000, 0.5, Tuning(step=0.1, window=window, promote_hits=2), Costs(0.04, 0.14), make
    )
    held: set[int] = set()
    for key, latent, image in requests:
        outcome = cache.look_up(key)
        assert (outcome is not Outcome.MISS) == (key in held) or key in cache.gone
        if outcome is Outcome.MISS:
            held.add(key)
            cache.fetched(key, latent)
        elif outcome is Outcome.PROMOTE:
            cache.promote(key, image)
        held -= set(cache.gone)
        cache.gone.clear()
        for each in range(31):
            assert (each in cache.images) + (each in cache.latents) == (each in held)
        assert cache.images.used_bytes + cache.latents.used_bytes <= cache.capacity_bytes
        assert 0.02 <= cache.alpha <= 0.98


def test_the_gradient_is_equation_2() -> None:
    counts = Counters(requests=1000, image_hits=400, image_tail_hits=40, latent_hits=300, latent_tail_hits=60)
    image_miss, full_miss = 600 / 1000, 300 / 600
    expected = -0.04 * (0.05 + 0.2 * full_miss) + 0.2 * image_miss * (60 / 600)
    assert gradient(counts, Costs(0.05, 0.2)) == pytest.approx(expected)
    quarter = -0.04 / 0.5 * (0.05 + 0.2 * full_miss) + 0.2 * image_miss * (60 / 600) / 1.5
    assert gradient(counts, Costs(0.05, 0.2), alpha=0.25) == pytest.approx(quarter), "per byte of either tail"
    assert gradient(Counters(), Costs(0.05, 0.2)) == 0
    assert gradient(Counters(requests=10, image_hits=10), Costs(0.05, 0.2)) == 0


@pytest.mark.parametrize("decode_s,fetch_s,direction", [(0.5, 0.001, 1), (0.001, 0.5, -1)])
def test_alpha_follows_the_costs(decode_s: float, fetch_s: float, direction: int) -> None:
    """Where decoding is dear, images are kept; where fetching is, as many latents as possible."""
    rng = random.Random(5)
    cache = DualCache[int](20_000, 0.5, Tuning(step=0.02, window=500, promote_hits=2), Costs(decode_s, fetch_s, True))
    for _ in range(40_000):
        key = rng.randrange(900)  # all fit as latents, a fifth as images
        match cache.look_up(key):
            case Outcome.MISS:
                cache.fetched(key, 20)
            case Outcome.PROMOTE:
                cache.promote(key, 100)
        cache.gone.clear()
    assert (cache.alpha - 0.5) * direction > 0.1


def test_costs_are_moving_averages() -> None:
    costs = Costs(0.04, 0.14)
    for _ in range(200):
        costs.decoded(0.4)
        costs.fetched(0.01)
    assert costs.decode_s == pytest.approx(0.4, rel=0.01)
    assert costs.fetch_s == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("values", [{"step": 0.0}, {"window": 0}, {"tail_share": 1.0}, {"promote_hits": 0}])
def test_tuning_that_tunes_nothing(values: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Tuning(**values)  # type: ignore[arg-type]
