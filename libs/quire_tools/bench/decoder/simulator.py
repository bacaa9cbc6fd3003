"""Runs the decoder's own cache over a trace, with latencies as numbers; and a cluster's queues, event by event.

The cache is `DualCache`, the very one that serves. Latencies of a request (LatentBox, Eq. 1): nothing for an image hit,
T_decode for a latent hit, T_fetch + T_decode for a miss.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from quire_tools.bench.decoder.latentbox.dual_cache import Costs, Counters, DualCache, Outcome, Tuning
from quire_tools.bench.decoder.latentbox.tiers import LruTier, Tier
from quire_tools.bench.decoder.trace import Trace

MakeTier = Callable[[int, float], Tier[int]]
DECODE_S: Final = 0.040
FETCH_S: Final = 0.140
_STEP: Final = 100_000


@dataclass(slots=True)
class Result:
    """Latencies in seconds by request, counts, and (requests, alpha, mean latency) after each window."""

    latencies: npt.NDArray[np.float32]
    total: Counters
    windows: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def mean_ms(self) -> float:
        return float(self.latencies.mean(dtype=np.float64)) * 1e3

    def percentile_ms(self, percent: float) -> float:
        return float(np.percentile(self.latencies, percent)) * 1e3


def simulate(
    trace: Trace,
    capacity_bytes: int,
    alpha: float,
    tuning: Tuning,
    *,
    make_tier: MakeTier = LruTier,
    decode_s: float = DECODE_S,
    fetch_s: float = FETCH_S,
    progress: Callable[[int], object] = lambda requests: None,
) -> Result:
    """`alpha` of 0 with a fixed tuning: latents alone, which are never promoted; of 1: images alone."""
    cache: DualCache[int] = DualCache(capacity_bytes, alpha, tuning, Costs(decode_s, fetch_s, fixed=True), make_tier)
    images, latents = trace.image_bytes.tolist(), trace.latent_bytes.tolist()
    latencies = np.zeros(len(trace), dtype=np.float32)
    result = Result(latencies, cache.total)
    miss_s, window_start = fetch_s + decode_s, 0
    look_up, gone = cache.look_up, cache.gone
    only_images = alpha == 1 and not tuning.adaptive
    only_latents = alpha == 0 and not tuning.adaptive
    for at, key in enumerate(trace.objects.tolist()):
        outcome = look_up(key)
        if outcome is Outcome.LATENT:
            latencies[at] = decode_s
        elif outcome is Outcome.MISS:
            latencies[at] = miss_s
            if only_images:
                cache.promote(key, images[key])
            else:
                cache.fetched(key, latents[key])
        elif outcome is Outcome.PROMOTE:
            latencies[at] = decode_s
            if not only_latents:
                cache.promote(key, images[key])
        if gone:
            gone.clear()
        if cache.window.requests == 0:
            result.windows.append((at + 1, cache.alpha, float(latencies[window_start : at + 1].mean())))
            window_start = at + 1
        if at % _STEP == _STEP - 1:
            progress(_STEP)
    return result


def simulate_image_store(trace: Trace, capacity_bytes: int, fetch_s: float = FETCH_S) -> npt.NDArray[np.float32]:
    """ImgStore: PNG in the object tier, an LRU of images in front, no decoding."""
    tier: LruTier[int] = LruTier(capacity_bytes, 0.1)
    images = trace.image_bytes.tolist()
    latencies = np.zeros(len(trace), dtype=np.float32)
    for at, key in enumerate(trace.objects.tolist()):
        if tier.hit(key) is None:
            latencies[at] = fetch_s
            tier.insert(key, images[key])
    return latencies


def belady_miss_ratio(trace: Trace, capacity_bytes: int, sizes: npt.NDArray[np.int64]) -> float:
    """Of a single-format cache that knows the future: out goes what is used last from now."""
    never = len(trace)
    upcoming = np.full(len(sizes), never, dtype=np.int64)
    next_use = np.empty(len(trace), dtype=np.int64)
    objects = trace.objects
    for at in range(len(trace) - 1, -1, -1):
        next_use[at] = upcoming[objects[at]]
        upcoming[objects[at]] = at
    here: dict[int, int] = {}
    order: list[tuple[int, int]] = []
    used = misses = 0
    size_of, nexts = sizes.tolist(), next_use.tolist()
    for at, key in enumerate(objects.tolist()):
        if key not in here:
            misses += 1
            used += size_of[key]
        here[key] = nexts[at]
        heapq.heappush(order, (-nexts[at], key))
        while used > capacity_bytes:
            use, oldest = heapq.heappop(order)
            if here.get(oldest) == -use:
                del here[oldest]
                used -= size_of[oldest]
    return misses / len(trace)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """`theta`: queue depth above which work goes elsewhere; infinite for never."""

    nodes: int = 6
    cache_bytes: int = 2 << 30
    theta: float = 4
    speed: float = 1000.0
    decode_s: float = DECODE_S
    fetch_s: float = FETCH_S
    tuning: Tuning = field(default_factory=lambda: Tuning(window=2000, step=0.005, promote_hits=8))


def simulate_cluster(trace: Trace, settings: ClusterSettings) -> tuple[npt.NDArray[np.float64], int]:
    """Latencies of every request, and how many decodes went elsewhere (LatentBox, §4.4, Figure 10).

    Each node has one device that decodes one latent at a time. Requests for an id that is being decoded wait for that
    decode. Results go into the owner's cache, also where another node decoded. Fetches occupy nothing.
    """
    nodes = range(settings.nodes)
    caches: list[DualCache[int]] = [
        DualCache(settings.cache_bytes, 0.5, settings.tuning, Costs(settings.decode_s, settings.fetch_s, fixed=True))
        for _ in nodes
    ]
    owner = np.random.default_rng(2).integers(0, settings.nodes, len(trace.image_bytes))
    free_at = [0.0] * settings.nodes
    queues: list[list[float]] = [[] for _ in nodes]  # ends of the decodes that each device has before it
    decoding: dict[int, float] = {}
    images, latents = trace.image_bytes.tolist(), trace.latent_bytes.tolist()
    times = ((trace.times - trace.times[0]) / settings.speed).tolist()
    latencies, spilled = np.zeros(len(trace)), 0
    for at, key in enumerate(trace.objects.tolist()):
        now, home = times[at], int(owner[key])
        for queue in queues:
            while queue and queue[0] <= now:
                heapq.heappop(queue)
        if (done := decoding.get(key, 0.0)) > now:
            latencies[at] = done - now
            continue
        cache = caches[home]
        outcome = cache.look_up(key)
        if outcome is Outcome.IMAGE:
            continue
        runner = home
        if len(queues[home]) > settings.theta:
            runner = min(nodes, key=lambda node: (len(queues[node]), free_at[node]))
            spilled += runner != home
        ready = now + (settings.fetch_s if outcome is Outcome.MISS else 0.0)
        begins = max(ready, free_at[runner])
        ends = begins + settings.decode_s
        free_at[runner] = ends
        heapq.heappush(queues[runner], ends)
        decoding[key] = ends
        latencies[at] = ends - now
        if outcome is Outcome.MISS:
            cache.fetched(key, latents[key])
        elif outcome is Outcome.PROMOTE:
            cache.promote(key, images[key])
        cache.gone.clear()
    return latencies, spilled
