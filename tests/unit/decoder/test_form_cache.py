"""What is kept in which form: rates that are learnt, the budget, and what a byte of a form saves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.model.errors import ConfigInvalid
from quire.model.images import ImageEntry
from quire_decoder.cache import Cache
from quire_decoder.config import DecoderConfig
from quire_decoder.core import form_cache
from quire_decoder.core.form_cache import Costs, Form, FormCache, KeptForm
from quire_decoder.core.reuse import Reuse

IMAGE, LATENT = 100, 20


def _cache(
    capacity: int = 1000, *, decode_s: float = 0.04, fetch_s: float = 0.14, history: int = 1024
) -> FormCache[int]:
    return FormCache(capacity, Costs(decode_s, fetch_s, fixed=True), random.Random(7).random, history)


def _request(cache: FormCache[int], key: int) -> Form | None:
    """As a decoder does: what is fetched and decoded is offered."""
    form = cache.look_up(key)
    if form is None:
        cache.keep(KeptForm(key, Form.LATENT), LATENT)
    if form is not Form.IMAGE and cache.wants(KeptForm(key, Form.IMAGE), IMAGE):
        cache.keep(KeptForm(key, Form.IMAGE), IMAGE)
    cache.gone.clear()
    return form


def test_rates_are_those_that_were_seen() -> None:
    """Things that are used every 8th time in mean, every 64th, and once: the rates come near, and keep their order."""
    reuse, rng = Reuse[str](1 << 12, 1), random.Random(2)
    for at in range(40_000):
        drawn = rng.random()
        if drawn < 1 / 8:
            item = "often"
        elif drawn < 2 / 8:
            item = f"rare {rng.randrange(8)}"
        else:
            item = f"once {at}"
        reuse.use(item, 0)
    for item in ("often", "rare 0", "once 39999"):
        reuse.use(item, 0)
    assert reuse.rate("often") == pytest.approx(1 / 8, rel=0.6)
    assert 0.2 / 64 < reuse.rate("rare 0") < 4 / 64
    assert reuse.rate("never seen") <= reuse.rate("once 39998") < reuse.rate("rare 0") / 10


def test_what_is_older_than_the_history_is_forgotten() -> None:
    reuse: Reuse[int] = Reuse(64, 2)
    reuse.use(-1, 1)
    for at in range(63):
        reuse.use(at, 0)
        assert len(reuse) == at + 2
    reuse.use(63, 0)
    assert len(reuse) == 64, "the first one is gone"
    for at in range(10_000):
        reuse.use(at % 3, at % 2)
        assert len(reuse) <= 64
    with pytest.raises(ValueError):
        Reuse(100, 1)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("rrrskkkx"), st.integers(0, 20), st.sampled_from(list(Form)), st.integers(1, 300)),
        max_size=300,
    )
)
def test_the_budget_holds_and_nothing_is_lost(events: list[tuple[str, int, Form, int]]) -> None:
    """Against a plain dictionary: what left is not here, what is here has not left, bytes add up by form."""
    cache, held = _cache(1000, history=64), dict[KeptForm[int], int]()
    for kind, key, form, size in events:
        kept = KeptForm(key, form, "small" if form is Form.RENDITION else "")
        if kind == "r":
            found = cache.look_up(key, kept.rendition)
            mine = [each.form for each in held if each.key == key and (kept.rendition or not each.rendition)]
            assert found == min(mine, default=None)
        elif kind == "s":
            cache.announce(key)
        elif kind == "k":
            there = kept in held
            if cache.keep(kept, size) and not there:
                held[kept] = size
        else:
            cache.remove(kept)
        for gone in cache.gone:
            del held[gone]
        cache.gone.clear()
        assert cache.used_bytes == sum(held.values()) <= 1000
        assert len(cache) == len(held) and all(each in cache for each in held)
        for each in Form:
            assert cache.bytes_of(each) == sum(size for one, size in held.items() if one.form is each)


def test_an_image_is_kept_with_its_first_decode_where_there_is_room() -> None:
    """LatentBox decodes it eight times first."""
    cache = _cache()
    assert [_request(cache, 1) for _ in range(3)] == [None, Form.IMAGE, Form.IMAGE]


@pytest.mark.parametrize(("decode_s", "fetch_s", "more"), [(0.5, 0.001, Form.IMAGE), (0.001, 0.5, Form.LATENT)])
def test_what_is_kept_follows_the_costs(decode_s: float, fetch_s: float, more: Form) -> None:
    """Where decoding is dear, images are kept; where fetching is, as many latents as possible."""
    cache, rng = _cache(20_000, decode_s=decode_s, fetch_s=fetch_s), random.Random(5)
    for _ in range(20_000):
        _request(cache, min(1999, int(rng.expovariate(1 / 400))))
    assert cache.bytes_of(more) > 0.8 * 20_000


def test_the_last_bytes_of_both_forms_are_worth_the_same() -> None:
    """What LatentBox's tuner steers to."""
    cache, rng = _cache(60_000, history=1 << 14), random.Random(3)
    for _ in range(60_000):
        _request(cache, int(rng.paretovariate(0.5)) % 20_000)
    worths = {
        form: sorted(cache._worth(kept, cache._size[kept]) for kept in cache._items if kept.form is form)
        for form in (Form.IMAGE, Form.LATENT)
    }
    least = {form: each[len(each) // 10] for form, each in worths.items()}
    assert 0.1 < least[Form.IMAGE] / least[Form.LATENT] < 10, least
    assert all(len(each) > 50 for each in worths.values()), "both forms are there"


def test_a_scan_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Favourites stay through things that are asked for once. Where any form may leave, they go."""

    def hits_of_favourites() -> int:
        cache, rng, hits = _cache(4_000, history=1 << 13), random.Random(9), 0
        for _ in range(4_000):
            _request(cache, rng.randrange(30))
        for key in range(1_000, 3_000):
            _request(cache, key)
            if key % 4 == 0:
                hits += _request(cache, rng.randrange(30)) is Form.IMAGE
        return hits

    sampled = hits_of_favourites()
    assert sampled > 300
    monkeypatch.setattr(form_cache, "_SAMPLED", 1)
    assert hits_of_favourites() < 0.8 * sampled


def test_a_hot_rendition_outlives_its_image() -> None:
    """It is small, and saves the decode too: the image's bytes go to others first."""
    cache = _cache(400)
    cache.keep(KeptForm(1, Form.LATENT), LATENT)
    cache.keep(KeptForm(1, Form.IMAGE), IMAGE)
    for at in range(300):
        cache.look_up(1, "small")
        cache.keep(KeptForm(1, Form.RENDITION, "small"), 5)
        _request(cache, 2 + at // 6)
    assert KeptForm(1, Form.RENDITION, "small") in cache
    assert KeptForm(1, Form.IMAGE) not in cache


def test_new_images_are_taken_for_used_once() -> None:
    cache = _cache(history=64)
    cache.announce(1)
    assert cache.total.requests == 0
    assert cache._reuse.rate((1, "")) > cache._reuse.rate((2, ""))


def _entry(number: int) -> ImageEntry:
    return ImageEntry(f"i{number}", bytes([number] * 32), 100, bytes(32), "", 8, 8)


def test_only_the_forms_that_are_wanted() -> None:
    keep: dict[str, Callable[[Cache, ImageEntry], None]] = {
        "renditions": lambda cache, entry: cache.keep_rendition(entry, "v", b"r"),
        "images": lambda cache, entry: cache.keep_image(entry, b"image"),
        "latents": lambda cache, entry: cache.keep_latent(entry, b"latent"),
    }
    for chosen in keep:
        cache = Cache(DecoderConfig(cache_forms=chosen))
        for each in keep.values():
            each(cache, _entry(1))
        assert cache.stats[f"cache.{chosen.removesuffix('s')}_bytes"] == cache.used_bytes > 0
        assert cache.wants_image(_entry(2)) == (chosen == "images")
    with pytest.raises(ConfigInvalid, match="pixels"):
        Cache(DecoderConfig(cache_forms="images,pixels"))


def test_costs_are_moving_averages_of_their_own() -> None:
    """Those that decoders start with were one object."""
    one, other = Cache(DecoderConfig()), Cache(DecoderConfig())
    for _ in range(200):
        one.costs.decoded(0.4)
        one.costs.fetched(0.01)
        one.costs.encoded(0.02)
    assert one.costs.decode_s == pytest.approx(0.4, rel=0.01)
    assert one.costs.fetch_s == pytest.approx(0.01, rel=0.05)
    assert one.costs.encode_s == pytest.approx(0.02, rel=0.05)
    assert other.costs.decode_s < 0.1
