"""LatentBox's serving experiment (§6.3), event by event: nodes with caches and one device each, a store far away.

Costs are the paper's: 10 ms to bring an image to the router (and 5 ms around it: an image hit took 15), 31 ms to decode
on a device that takes one latent at a time, and a fetch by what is fetched: 130 ms in mean for a latent of 0.28 MB, 146
for a PNG of 1.4 MB, 79 where every request fetches and the store itself is warm. How fetches spread is taken from the
paper's percentiles of ImgStore, LB-LatentCache and Decode-All; the load from its 15.2 ms of queueing in LB-LatentCache.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from quire_decoder.core.cache_tiers import LruTier
from quire_decoder.core.dual_cache import Costs, DualCache, Outcome, Tuning
from quire_decoder.core.form_cache import Costs as FormCosts
from quire_decoder.core.form_cache import Form, FormCache, KeptForm
from quire_tools.plan.image_trace import ImageTrace

NODES: Final = 3
NODE_BYTES: Final = 2_000_000_000
WINDOW: Final = 66_581
WARMUP: Final = 15 * WINDOW  # 720 hours before 48
PNG_BYTES: Final = 1_736_000  # of an image in the window: 21.4 GB / 12,328
LATENT_BYTES: Final = 292_000
QUEUED_S: Final = 0.0152
IMAGES: Final = 188_000
"""Of the generated trace: its window has 12,700 images and 25% misses of ImgStore (the paper: 12,328 and 22.6%)."""
_SUBSET: Final = 1000
_STEP: Final = 100_000
GENERATE_S: Final = 3.905
GENERATED_S: Final = 4.309
Floats = npt.NDArray[np.float64]

TABLE_4: Final[dict[str, tuple[float, float, float, float]]] = {
    "Generation": (4309, 4130, 13647, 17518),
    "Decode-All": (137.3, 132.6, 209.1, 275.9),
    "ImgStore": (49.4, 14.1, 198.7, 276.9),
    "LB-ImgCache": (58.0, 15.6, 213.9, 285.3),
    "LB-LatentCache": (77.0, 53.8, 180.9, 234.3),
    "LB-Adaptive": (41.2, 15.8, 178.5, 227.3),
}
"""Mean, P50, P95, P99 in milliseconds, as published."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Seconds of a fetch: log-normal."""

    mean_s: float
    sigma: float

    def draw(self, count: int, seed: int) -> Floats:
        """For each request one, whether it needs it or not: set-ups are compared on the same."""
        normal = np.random.default_rng(seed).standard_normal(count)
        return np.asarray(self.mean_s * np.exp(self.sigma * normal - self.sigma**2 / 2))


LATENT_FETCH: Final = Fetch(0.130, 0.31)
PNG_FETCH: Final = Fetch(0.146, 0.378)
WARM_FETCH: Final = Fetch(0.079, 0.42)


class Found(Enum):
    """Where a node's cache found an image."""

    IMAGE = "image"
    LATENT = "latent"
    MISS = "miss"


class NodeCache(Protocol):
    """One node's cache; what it fetches and decodes it may keep."""

    def request(self, key: int, image_bytes: int, latent_bytes: int) -> Found: ...
    def stored(self, key: int, latent_bytes: int) -> None:
        """An image is new."""


class Nothing:
    """No cache."""

    def request(self, key: int, image_bytes: int, latent_bytes: int) -> Found:
        return Found.MISS

    def stored(self, key: int, latent_bytes: int) -> None:
        return


class Images(Nothing):
    """An LRU of images."""

    def __init__(self, capacity_bytes: int) -> None:
        self._tier: LruTier[int] = LruTier(capacity_bytes, 0.1)

    def request(self, key: int, image_bytes: int, latent_bytes: int) -> Found:
        if self._tier.hit(key) is not None:
            return Found.IMAGE
        self._tier.insert(key, image_bytes)
        return Found.MISS


class Dual(Nothing):
    """LatentBox's cache; `alpha` 0 that stays 0: latents alone."""

    def __init__(self, capacity_bytes: int, alpha: float, tuning: Tuning, decode_s: float) -> None:
        costs = Costs(decode_s, LATENT_FETCH.mean_s, fixed=True)
        self._cache: DualCache[int] = DualCache(capacity_bytes, alpha, tuning, costs)
        self._promotes = alpha > 0 or tuning.adaptive

    def request(self, key: int, image_bytes: int, latent_bytes: int) -> Found:
        outcome = self._cache.look_up(key)
        if outcome is Outcome.MISS:
            self._cache.fetched(key, latent_bytes)
        elif outcome is Outcome.PROMOTE and self._promotes:
            self._cache.promote(key, image_bytes)
        self._cache.gone.clear()
        return {Outcome.IMAGE: Found.IMAGE, Outcome.MISS: Found.MISS}.get(outcome, Found.LATENT)


class Forms:
    """The decoder's cache. `warm`: new images enter it, as gateways see to."""

    def __init__(self, capacity_bytes: int, decode_s: float, history: int, seed: int, *, warm: bool) -> None:
        self._warm = warm
        costs = FormCosts(decode_s, LATENT_FETCH.mean_s, fixed=True)
        self._cache: FormCache[int] = FormCache(capacity_bytes, costs, Random(seed).random, history)

    def request(self, key: int, image_bytes: int, latent_bytes: int) -> Found:
        cache = self._cache
        form = cache.look_up(key)
        if form is Form.IMAGE:
            return Found.IMAGE
        if form is None:
            cache.keep(KeptForm(key, Form.LATENT), latent_bytes)
        if cache.wants(image := KeptForm(key, Form.IMAGE), image_bytes):
            cache.keep(image, image_bytes)
        cache.gone.clear()
        return Found.MISS if form is None else Found.LATENT

    def stored(self, key: int, latent_bytes: int) -> None:
        if not self._warm:
            return
        self._cache.announce(key)
        self._cache.keep(KeptForm(key, Form.LATENT), latent_bytes)
        self._cache.gone.clear()


@dataclass(frozen=True, slots=True)
class SetUp:
    """`make`: a node's cache, of its bytes and a seed. `decodes`: what is fetched is a latent."""

    make: Callable[[int, int], NodeCache]
    decodes: bool = True
    fetch: Fetch = LATENT_FETCH


@dataclass(frozen=True, slots=True)
class Serving:
    """`theta`: latents in an owner's queue above which another node decodes; infinite for never.

    `window_s`: how long the window takes, whatever it took when it was recorded.
    """

    nodes: int = NODES
    node_bytes: int = NODE_BYTES
    window: int = WINDOW
    warmup: int = WARMUP
    window_s: float = 17_280.0
    theta: float = float("inf")
    decode_s: float = 0.031
    transfer_s: float = 0.010
    around_s: float = 0.005


@dataclass(slots=True)
class Served:
    """Figures of the window: seconds and source by request, seconds in a device's queue, decodes elsewhere."""

    seconds: Floats
    found: list[Found]
    queued_s: Floats
    spilled: int = 0

    @property
    def mean_ms(self) -> float:
        return float(self.seconds.mean()) * 1e3

    def percentile_ms(self, percent: float) -> float:
        """`percent`: 0 to 100."""
        return float(np.percentile(self.seconds, percent)) * 1e3

    def share(self, found: Found) -> float:
        """Of the requests, 0 to 1."""
        return self.found.count(found) / len(self.found)


def paper_setups(decode_s: float = Serving().decode_s, tuning: Tuning | None = None) -> dict[str, SetUp]:
    """Table 4's, without generation."""
    tuning = tuning or Tuning(window=10_000, step=0.02)
    fixed = replace(tuning, adaptive=False)
    return {
        "Decode-All": SetUp(lambda _, __: Nothing(), fetch=WARM_FETCH),
        "ImgStore": SetUp(lambda size, _: Images(size), decodes=False, fetch=PNG_FETCH),
        "LB-ImgCache": SetUp(lambda size, _: Images(size)),
        "LB-LatentCache": dual_setup(0.0, fixed, decode_s),
        "LB-Adaptive": dual_setup(0.5, tuning, decode_s),
    }


def dual_setup(alpha: float, tuning: Tuning, decode_s: float = Serving().decode_s) -> SetUp:
    """LatentBox's cache with another split, or another tuning."""
    return SetUp(lambda size, _: Dual(size, alpha, tuning, decode_s))


def quire_setup(decode_s: float = Serving().decode_s, history: int = 1 << 17, *, warm: bool = True) -> SetUp:
    """The decoder's own cache; `warm`: new images enter it."""
    return SetUp(lambda size, seed: Forms(size, decode_s, history, seed, warm=warm))


def sized(trace: ImageTrace) -> ImageTrace:
    """With the paper's mean sizes in its window."""
    factors = PNG_BYTES / trace.image_bytes.mean(), LATENT_BYTES / trace.latent_bytes.mean()
    images, latents = (
        (each * factor).astype(np.int64)
        for each, factor in zip((trace.image_bytes, trace.latent_bytes), factors, strict=True)
    )
    return replace(trace, image_bytes=images, latent_bytes=latents)


def serve(
    trace: ImageTrace, setup: SetUp, serving: Serving, progress: Callable[[int], object] = lambda requests: None
) -> Served:
    """The last `window` requests of a trace, after `warmup` requests that are not timed."""
    return timed(trace, setup, serving, look_ups(trace, setup, serving, progress))


def look_ups(
    trace: ImageTrace, setup: SetUp, serving: Serving, progress: Callable[[int], object] = lambda requests: None
) -> list[Found]:
    """Where each request of the window finds its image: in which order they come counts, not when."""
    first, start = _bounds(trace, serving)
    images, latents = trace.image_bytes.tolist(), trace.latent_bytes.tolist()
    caches = [setup.make(serving.node_bytes, node) for node in range(serving.nodes)]
    owners, new, found = _owners(trace, serving), _births(trace, first), list[Found]()
    for at, key in enumerate(trace.objects[first:].tolist()):
        cache = caches[owners[key]]
        if new[at]:
            cache.stored(key, latents[key])
        found.append(cache.request(key, images[key], latents[key]))
        if at % _STEP == _STEP - 1:
            progress(_STEP)
    return found[start - first :]


class _Devices:
    """One per node; each takes the latents that wait for it in the order in which they were there."""

    def __init__(self, nodes: int, decode_s: float) -> None:
        self._decode_s = decode_s
        self._free_at = [0.0] * nodes
        self._coming: list[tuple[float, int, int]] = []  # when a latent is there, which request, where
        self._ends: list[list[float]] = [[] for _ in range(nodes)]
        self._assigned = [0] * nodes
        self.begins: dict[int, float] = {}
        self.there: dict[int, float] = {}

    def add(self, request: int, node: int, there: float) -> None:
        heapq.heappush(self._coming, (there, request, node))
        self._assigned[node] += 1

    def until(self, now: float) -> None:
        """All that begins with what is there by `now`."""
        while self._coming and self._coming[0][0] <= now:
            there, request, node = heapq.heappop(self._coming)
            begins = max(there, self._free_at[node])
            self._free_at[node] = begins + self._decode_s
            self.begins[request], self.there[request] = begins, there
            heapq.heappush(self._ends[node], begins + self._decode_s)

    def depths(self, now: float) -> list[int]:
        """Latents at each node that are not decoded yet."""
        for node, ends in enumerate(self._ends):
            while ends and ends[0] <= now:
                heapq.heappop(ends)
                self._assigned[node] -= 1
        return self._assigned

    def ended(self, request: int, now: float) -> bool:
        return request in self.begins and self.begins[request] + self._decode_s <= now


def timed(
    trace: ImageTrace, setup: SetUp, serving: Serving, found: list[Found], owners: list[int] | None = None
) -> Served:
    """How long the requests of the window take, by where they find their images. `owners`: of each image its node.

    Requests for an image that is being fetched or decoded wait for that (§4.4); a fetch occupies nothing.
    """
    _, start = _bounds(trace, serving)
    keys, owners = trace.objects[start:].tolist(), owners or _owners(trace, serving)
    times = trace.times[start:] - trace.times[start]
    times = (times * (serving.window_s / max(1e-9, float(times[-1])))).tolist()
    fetch_s = setup.fetch.draw(len(times), 7).tolist()
    served = Served(np.zeros(len(times)), found, np.zeros(len(times)))
    devices, nodes = _Devices(serving.nodes, serving.decode_s), range(serving.nodes)
    leaders: dict[int, int] = {}  # of an image, the request that last had it decoded or fetched
    done: dict[int, float] = {}
    leader_of = list(range(len(times)))
    for at, (key, outcome, now) in enumerate(zip(keys, found, times, strict=True)):
        if outcome is Found.IMAGE:
            done[at] = now
            continue
        devices.until(now)
        leader = leaders.get(key)
        if leader is not None and not (done[leader] <= now if leader in done else devices.ended(leader, now)):
            leader_of[at] = leader
            continue
        leaders[key] = at
        there = now + (fetch_s[at] if outcome is Found.MISS else 0.0)
        if not setup.decodes:
            done[at] = there
            continue
        home = runner = owners[key]
        depths = devices.depths(now)
        if depths[home] > serving.theta:
            runner = min(nodes, key=lambda node: (depths[node], node != home))
            served.spilled += runner != home
        devices.add(at, runner, there)
    devices.until(math.inf)
    for at, now in enumerate(times):
        leader = leader_of[at]
        ends = done[leader] if leader in done else devices.begins[leader] + serving.decode_s
        served.seconds[at] = ends - now + serving.transfer_s + serving.around_s
        if at in devices.begins:
            served.queued_s[at] = devices.begins[at] - devices.there[at]
    return served


def _bounds(trace: ImageTrace, serving: Serving) -> tuple[int, int]:
    """The first request of the warm-up, and that of the window."""
    start = max(0, len(trace) - serving.window)
    return max(0, start - serving.warmup), start


def _owners(trace: ImageTrace, serving: Serving) -> list[int]:
    """Of each image the node that it belongs to."""
    owners: list[int] = np.random.default_rng(2).integers(0, serving.nodes, len(trace.image_bytes)).tolist()
    return owners


def _births(trace: ImageTrace, first: int) -> list[bool]:
    """Of the requests from `first` on, which is the first one that there ever was for its image."""
    _, earliest = np.unique(trace.objects, return_index=True)
    births = np.zeros(len(trace), dtype=bool)
    births[earliest] = True
    listed: list[bool] = births[first:].tolist()
    return listed


def loaded(trace: ImageTrace, serving: Serving, queued_s: float = QUEUED_S) -> Serving:
    """With the window so long that LB-LatentCache's requests queue for so long in mean, as the paper's did."""
    setup = paper_setups(serving.decode_s)["LB-LatentCache"]
    found = look_ups(trace, setup, serving)
    return as_long_as(serving, lambda tried: bool(timed(trace, setup, tried, found).queued_s.mean() < queued_s))


def as_long_as(serving: Serving, enough: Callable[[Serving], bool]) -> Serving:
    """The shortest window that is long enough."""
    low, high = 1.0, 1e7
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(replace(serving, window_s=middle)) else (middle, high)
    return replace(serving, window_s=high)


def generation(trace: ImageTrace, serving: Serving) -> Served:
    """On-demand generation of the window's first thousand requests: a repeated request is served from a cache.

    At the rate at which the mean is the paper's.
    """
    start = max(0, len(trace) - serving.window)
    part = slice(start, start + _SUBSET)
    subset = replace(trace, times=trace.times[part], objects=trace.objects[part])
    unbounded = replace(serving, node_bytes=1 << 50, window=len(subset), warmup=0, decode_s=GENERATE_S)
    setup = SetUp(lambda size, _: Images(size), fetch=Fetch(0.0, 0.0))
    found = look_ups(subset, setup, unbounded)
    rated = as_long_as(unbounded, lambda tried: bool(timed(subset, setup, tried, found).seconds.mean() < GENERATED_S))
    return timed(subset, setup, rated, found)


def floor_ms(trace: ImageTrace, serving: Serving, capacity_bytes: int) -> float:
    """Mean latency that no cache of both forms can beat, knowing the future, with idle devices.

    To have a form at an image's next request takes its bytes for the requests in between. All of these together are at
    most the capacity times the requests: so what saves most per byte and request is taken, whether it fits in time or
    not (the linear relaxation of the choice that Belady's rule makes for one form).
    """
    first, start = _bounds(trace, serving)
    keys = trace.objects[first:]
    order = np.lexsort((np.arange(len(keys)), keys))
    same = keys[order][1:] == keys[order][:-1]
    ends, begins = order[1:][same], order[:-1][same]
    counted = ends >= start - first
    ends, begins = ends[counted], begins[counted]
    waits = np.minimum(ends - begins, ends - (start - first) + 1)  # what was kept before the window is free
    images, latents = trace.image_bytes[keys[ends]], trace.latent_bytes[keys[ends]]
    sizes = np.concatenate((latents * waits, np.maximum(1, images - latents) * waits)).astype(np.float64)
    saves = np.concatenate((np.full(len(ends), LATENT_FETCH.mean_s), np.full(len(ends), serving.decode_s)))
    best = np.argsort(-saves / sizes)
    held = np.cumsum(sizes[best]) <= float(capacity_bytes) * serving.window
    saved_s = float(saves[best][held].sum())
    worst_s = serving.window * (LATENT_FETCH.mean_s + serving.decode_s + serving.transfer_s + serving.around_s)
    return (worst_s - saved_s) / serving.window * 1e3
