"""The bytes of the dual-format cache: `core.dual_cache` decides what stays, in which form."""

from __future__ import annotations

from quire.model.images import ImageEntry
from quire_decoder.config import DecoderConfig
from quire_decoder.core.dual_cache import Costs, DualCache, Outcome, Tuning


class Cache:
    """Images (lossless) and latent records by the digest of the record."""

    def __init__(self, config: DecoderConfig) -> None:
        self._only_images = config.alpha >= 1 and not config.tune
        tuning = Tuning(
            config.tune_step, config.tune_window, config.tail_share, config.promote_hits, adaptive=config.tune
        )
        costs = Costs(0.04, 0.14)  # until some were measured
        self._cache: DualCache[bytes] = DualCache(config.cache_bytes, min(1.0, config.alpha), tuning, costs)
        self._bytes: dict[bytes, bytes] = {}

    @property
    def capacity_bytes(self) -> int:
        return self._cache.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Of both forms."""
        return self._cache.images.used_bytes + self._cache.latents.used_bytes

    @property
    def costs(self) -> Costs:
        """What fetching and decoding take here: the split is tuned by them."""
        return self._cache.costs

    @property
    def stats(self) -> dict[str, float]:
        """For `quire status`."""
        cache, total = self._cache, self._cache.total
        return {
            "requests": total.requests,
            "hits.image": total.image_hits,
            "hits.latent": total.latent_hits,
            "misses": total.full_misses,
            "cache.alpha": cache.alpha,
            "cache.gradient": cache.last_gradient,
            "cache.images": len(cache.images),
            "cache.latents": len(cache.latents),
            "cache.bytes": self.used_bytes,
            "decode_ms": cache.costs.decode_s * 1e3,
            "fetch_ms": cache.costs.fetch_s * 1e3,
        }

    def look_up(self, key: bytes) -> tuple[Outcome, bytes | None]:
        """Where it is, and its bytes, taken before anything else can happen: looking up may move the split."""
        outcome = self._cache.look_up(key)
        data = None if outcome is Outcome.MISS else self._bytes[key]
        self._drop_gone()
        return outcome, data

    def wants_image(self, outcome: Outcome) -> bool:
        """Whether what was looked up with this outcome is to be kept as an image.

        A cache of images alone takes them at the first miss: there are no latent hits to count.
        """
        return self._only_images or (outcome is Outcome.PROMOTE and self._cache.alpha > 0)

    def has_latent(self, key: bytes) -> bool:
        return key in self._cache.latents

    def keep_latent(self, entry: ImageEntry, record: bytes) -> None:
        """Keep a record, unless one form of it is here."""
        key = entry.record_sha256
        if not self._cache.holds(key):
            self._bytes[key] = record
            self._cache.fetched(key, len(record))
            self._drop_gone()

    def keep_image(self, entry: ImageEntry, lossless: bytes) -> None:
        """Keep an image in place of its latent."""
        key = entry.record_sha256
        if (self._only_images or key in self._cache.latents) and self._cache.promote(key, len(lossless)):
            self._bytes[key] = lossless
        self._drop_gone()

    def _drop_gone(self) -> None:
        for key in self._cache.gone:
            if not self._cache.holds(key):  # it may have come back since
                self._bytes.pop(key, None)
        self._cache.gone.clear()
