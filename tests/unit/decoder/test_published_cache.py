"""LatentBox's published cache in the decoder: it decides as in the simulation, and its bytes are those it names."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.model.images import ImageEntry
from quire_decoder.cache import Cache
from quire_decoder.config import DecoderConfig
from quire_decoder.core.dual_cache import Costs as DualCosts
from quire_decoder.core.dual_cache import DualCache, Outcome, Tuning
from quire_decoder.core.form_cache import Costs, Form, KeptForm
from quire_decoder.core.published_cache import ALPHA, PublishedCache

_TUNING = Tuning(step=0.05, window=50, promote_hits=3)


@settings(max_examples=60)
@given(events=st.lists(st.tuples(st.sampled_from("lllkr"), st.integers(0, 9), st.integers(1, 30)), max_size=200))
def test_what_has_not_left_is_here(events: list[tuple[str, int, int]]) -> None:
    cache, stored = PublishedCache[int](200, Costs(0.04, 0.14), _TUNING), dict[KeptForm[int], int]()
    for kind, key, size in events:
        if kind == "r":
            cache.remove(KeptForm(key, Form.IMAGE))
        elif kind == "k":
            for form in (Form.LATENT, Form.IMAGE, Form.RENDITION):
                item = KeptForm(key, form, "a" if form is Form.RENDITION else "")
                if cache.wants(item, size) and cache.keep(item, size):
                    stored[item] = size
        else:
            hit = cache.look_up(key)
            assert hit is None or KeptForm(key, hit) in stored
        for evicted in cache.gone:
            stored.pop(evicted, None)
        cache.gone.clear()
        assert cache.used_bytes == sum(stored.values()) <= cache.capacity_bytes
        assert all(item in cache for item in stored)
        assert {item.form for item in stored} <= {Form.LATENT, Form.IMAGE}
        assert len({item.key for item in stored}) == len(stored), "an object is in one form"
        for form in Form:
            assert cache.bytes_of(form) == sum(size for item, size in stored.items() if item.form is form)


def test_it_decides_as_the_simulated_one() -> None:
    """The same hits, promotions and split, request by request, on a skewed trace."""
    rng = random.Random(1)
    simulated = DualCache[int](3000, ALPHA, _TUNING, DualCosts(0.04, 0.14, fixed=True))
    cache = PublishedCache[int](3000, Costs(0.04, 0.14, fixed=True), _TUNING)
    promotions = 0
    for _ in range(4000):
        key = int(rng.paretovariate(0.8)) % 300
        outcome, form = simulated.look_up(key), cache.look_up(key)
        expected = {Outcome.IMAGE: Form.IMAGE, Outcome.MISS: None}.get(outcome, Form.LATENT)
        assert form is expected
        if outcome is Outcome.MISS:
            simulated.fetched(key, 30)
            cache.keep(KeptForm(key, Form.LATENT), 30)
        assert cache.wants(KeptForm(key, Form.IMAGE), 150) == (outcome is Outcome.PROMOTE)
        if outcome is Outcome.PROMOTE:
            promotions += 1
            assert simulated.promote(key, 150) == cache.keep(KeptForm(key, Form.IMAGE), 150)
        assert cache.alpha == simulated.alpha
    assert promotions > 20 and cache.alpha != ALPHA, "the trace promotes, and moves the split"


def test_an_image_that_has_no_room_is_not_made() -> None:
    """Such an image would be encoded at every eighth hit, and discarded."""
    cache = PublishedCache[int](1000, Costs(0.04, 0.14), _TUNING)
    cache.keep(KeptForm(1, Form.LATENT), 30)
    for _ in range(20):
        cache.look_up(1)
        assert not cache.wants(KeptForm(1, Form.IMAGE), 900)


def test_bytes_leave_with_their_form_and_nothing_is_stored_before_a_request() -> None:
    """Also where the tuner moves the split in a look-up. Which forms are stored is the cache's own."""
    cache = Cache(DecoderConfig(cache="latentbox", cache_bytes=4000, cache_window=100, cache_forms="renditions"))
    entries = [ImageEntry(f"{number}", bytes([number]) * 32, 100, b"v" * 32, "", 8, 8) for number in range(40)]
    images = 0.0
    for number in range(4000):
        entry = entries[int(random.Random(number).paretovariate(0.7)) % 40]
        form, _ = cache.look_up(entry, "")
        assert sum(map(len, cache._bytes.values())) == cache.used_bytes
        if form is None:
            cache.keep_latent(entry, bytes(100))
        elif cache.wants_image(entry):
            cache.keep_image(entry, bytes(300))
        images = max(images, cache.stats["cache.image_bytes"])
    assert images and cache.stats["cache.latent_bytes"]
    cache.forget_pixels()
    assert sum(map(len, cache._bytes.values())) == cache.used_bytes == cache.stats["cache.latent_bytes"]
    assert not cache.takes_new and Cache(DecoderConfig()).takes_new


def test_the_decoders_cache_with_it() -> None:
    """A latent becomes an image at its eighth hit, and is stored in one form; renditions are not."""
    cache = Cache(DecoderConfig(cache="latentbox", cache_bytes=1 << 20))
    entry = ImageEntry("a", b"r" * 32, 100, b"v" * 32, "", 64, 64)
    cache.look_up(entry, "webp")
    cache.keep_latent(entry, b"latent")
    cache.keep_rendition(entry, "webp", b"picture")
    for hits in range(8):
        assert not cache.wants_image(entry), hits
        assert cache.look_up(entry, "webp") == (Form.LATENT, b"latent")
    assert cache.wants_image(entry)
    cache.keep_image(entry, b"lossless")
    assert cache.look_up(entry, "webp") == (Form.IMAGE, b"lossless")
    assert cache.used_bytes == len(b"lossless") and cache.stats["cache.alpha"] == ALPHA
    cache.forget_pixels()
    assert cache.look_up(entry, "") == (None, None) and not cache.used_bytes
