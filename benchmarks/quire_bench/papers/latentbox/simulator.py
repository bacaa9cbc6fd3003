"""LatentBox's cache over a trace, with latencies as numbers (§6.5): what the tuner and its parameters are worth.

Latencies of a request (LatentBox, Eq. 1): nothing for an image hit,
T_decode for a latent hit, T_fetch + T_decode for a miss.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from quire_decoder.core.cache_tiers import LruTier, Tier
from quire_decoder.core.dual_cache import Costs, Counters, DualCache, Outcome, Tuning
from quire_tools.plan.image_trace import ImageTrace

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
        """`percent`: 0 to 100."""
        return float(np.percentile(self.latencies, percent)) * 1e3


def simulate(
    trace: ImageTrace,
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


def simulate_image_store(trace: ImageTrace, capacity_bytes: int, fetch_s: float = FETCH_S) -> npt.NDArray[np.float32]:
    """ImgStore: PNG in the object tier, an LRU of images in front, no decoding."""
    tier: LruTier[int] = LruTier(capacity_bytes, 0.1)
    images = trace.image_bytes.tolist()
    latencies = np.zeros(len(trace), dtype=np.float32)
    for at, key in enumerate(trace.objects.tolist()):
        if tier.hit(key) is None:
            latencies[at] = fetch_s
            tier.insert(key, images[key])
    return latencies


def belady_miss_ratio(trace: ImageTrace, capacity_bytes: int, sizes: npt.NDArray[np.int64]) -> float:
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
