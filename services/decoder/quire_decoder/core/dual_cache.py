"""Images and latents in one budget, and the tuner of the split (LatentBox, §4.2 and §4.3).

An object is in exactly one tier. A look-up asks the image tier, then the latent tier. A miss that is fetched enters the
latent tier; at its h-th hit there it is decoded into the image tier. After every window of W requests the sign of the
gradient D (Eq. 2) moves α, the image tier's part of the capacity, by a step Δ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic

from quire_decoder.core.cache_tiers import Key, LruTier, Tier

_AVERAGE_SHARE: Final = 0.05


class Outcome(Enum):
    """Where a look-up found an object."""

    IMAGE = "image"
    LATENT = "latent"
    PROMOTE = "promote"
    """In the latent tier for the h-th time: decode it, then call `promote`."""
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Tuning:
    """Step Δ, window W in requests, tail share τ, promotion threshold h, and the bounds of α.

    `adaptive`: whether α moves. `normalised`: whether a tail's hits are divided by its tier's share of the memory; they
    are not in the paper.
    """

    step: float = 0.005
    window: int = 1_000_000
    tail_share: float = 0.10
    promote_hits: int = 8
    alpha_min: float = 0.02
    alpha_max: float = 0.98
    adaptive: bool = True
    normalised: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.step < 1 or self.window < 1 or not 0 < self.tail_share < 1 or self.promote_hits < 1:
            raise ValueError(f"{self} cannot tune anything")
        if not 0 <= self.alpha_min <= self.alpha_max <= 1:
            raise ValueError(f"alpha within {self.alpha_min}..{self.alpha_max}")


@dataclass(slots=True)
class Counters:
    """Of one window, or of a lifetime."""

    requests: int = 0
    image_hits: int = 0
    image_tail_hits: int = 0
    latent_hits: int = 0
    latent_tail_hits: int = 0

    @property
    def image_misses(self) -> int:
        return self.requests - self.image_hits

    @property
    def full_misses(self) -> int:
        return self.image_misses - self.latent_hits


@dataclass(slots=True)
class Costs:
    """T_decode and T_fetch, seconds: moving averages of what was measured. `fixed`: they stay as they are."""

    decode_s: float
    fetch_s: float
    fixed: bool = False

    def decoded(self, seconds: float) -> None:
        """Learn from a decode that took so long."""
        if not self.fixed:
            self.decode_s += _AVERAGE_SHARE * (seconds - self.decode_s)

    def fetched(self, seconds: float) -> None:
        if not self.fixed:
            self.fetch_s += _AVERAGE_SHARE * (seconds - self.fetch_s)


def gradient(counts: Counters, costs: Costs, alpha: float = 0.5) -> float:
    """D of Eq. 2: below 0 the image tier's last bytes are worth more, above 0 the latent tier's.

    A tail is a share of its tier, and a larger tier has a larger tail: so that the two are worth of the same number
    of bytes, each rate is divided by its tier's part of the capacity. (Without that the larger tier grows for ever.)
    """
    if not counts.requests or not counts.image_misses:
        return 0.0
    image_miss_rate = counts.image_misses / counts.requests
    full_miss_rate = counts.full_misses / counts.image_misses
    image_marginal = counts.image_tail_hits / counts.requests / (2 * max(alpha, 1e-9))
    latent_marginal = counts.latent_tail_hits / counts.image_misses / (2 * max(1 - alpha, 1e-9))
    return (
        -image_marginal * (costs.decode_s + costs.fetch_s * full_miss_rate)
        + costs.fetch_s * image_miss_rate * latent_marginal
    )


@dataclass(slots=True)
class DualCache(Generic[Key]):
    """Keys and sizes only: who holds the bytes is told what leaves, in `gone`, and empties it.

    `alpha`: at first; 0 and 1 with `Tuning(adaptive=False)` make single-format caches.
    """

    capacity_bytes: int
    alpha: float
    tuning: Tuning = field(default_factory=Tuning)
    costs: Costs = field(default_factory=lambda: Costs(0.04, 0.14))
    make_tier: Callable[[int, float], Tier[Key]] = LruTier
    gone: list[Key] = field(default_factory=list)
    window: Counters = field(default_factory=Counters)
    total: Counters = field(default_factory=Counters)
    last_gradient: float = 0.0
    images: Tier[Key] = field(init=False)
    latents: Tier[Key] = field(init=False)
    _hits: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0 or not 0 <= self.alpha <= 1:
            raise ValueError(f"{self.capacity_bytes} bytes, alpha {self.alpha}")
        self.images = self.make_tier(self._image_bytes, self.tuning.tail_share)
        self.latents = self.make_tier(self.capacity_bytes - self._image_bytes, self.tuning.tail_share)

    @property
    def _image_bytes(self) -> int:
        return int(self.capacity_bytes * self.alpha)

    def look_up(self, key: Key) -> Outcome:
        """Count a request and say where the object is."""
        window, total = self.window, self.total
        window.requests += 1
        total.requests += 1
        outcome = Outcome.MISS
        if (in_tail := self.images.hit(key)) is not None:
            window.image_hits += 1
            total.image_hits += 1
            window.image_tail_hits += in_tail
            total.image_tail_hits += in_tail
            outcome = Outcome.IMAGE
        elif (in_tail := self.latents.hit(key)) is not None:
            window.latent_hits += 1
            total.latent_hits += 1
            window.latent_tail_hits += in_tail
            total.latent_tail_hits += in_tail
            hits = self._hits[key] = self._hits.get(key, 0) + 1
            outcome = Outcome.PROMOTE if hits >= self.tuning.promote_hits else Outcome.LATENT
        if window.requests >= self.tuning.window:
            self._tune()
        return outcome

    def holds(self, key: Key) -> bool:
        """Whether it is in a tier; counts nothing."""
        return key in self.images or key in self.latents

    def fetched(self, key: Key, latent_bytes: int) -> None:
        """A latent came from storage: it enters the latent tier, with no hits."""
        if not self.holds(key):
            self._leave(self.latents.insert(key, latent_bytes))

    def has_room(self, image_bytes: int) -> bool:
        """Whether the image tier is large enough for such an image."""
        return image_bytes <= self.images.capacity_bytes * (1 - self.tuning.tail_share)

    def promote(self, key: Key, image_bytes: int) -> bool:
        """Move an object from the latent tier, if it is there, to the image tier; whether it is an image now.

        One that the image tier has no room for stays a latent.
        """
        if key in self.images:
            return True
        if not self.has_room(image_bytes):
            if key in self.latents:
                self._hits[key] = 0
            return False
        self.latents.remove(key)
        self._hits.pop(key, None)
        left = self.images.insert(key, image_bytes)
        self._leave(left)
        return key not in left

    def forget(self, key: Key) -> None:
        """The object was deleted or replaced."""
        if self.images.remove(key) or self.latents.remove(key):
            self._leave([key])

    def _tune(self) -> None:
        if self.tuning.adaptive:
            self.last_gradient = gradient(self.window, self.costs, self.alpha if self.tuning.normalised else 0.5)
            if self.last_gradient:
                step = self.tuning.step if self.last_gradient < 0 else -self.tuning.step
                self.alpha = min(self.tuning.alpha_max, max(self.tuning.alpha_min, self.alpha + step))
                self._leave(self.images.resize(self._image_bytes))
                self._leave(self.latents.resize(self.capacity_bytes - self._image_bytes))
        self.window = Counters()

    def _leave(self, keys: list[Key]) -> None:
        for key in keys:
            self._hits.pop(key, None)
        self.gone += keys
