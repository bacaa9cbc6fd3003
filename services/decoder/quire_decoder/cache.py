"""The bytes of the cache: `core.form_cache` or `core.published_cache` decides what stays, in which form."""

from __future__ import annotations

from random import Random
from typing import Final

from quire.model.errors import ConfigInvalid
from quire.model.images import ImageEntry
from quire_decoder.config import DecoderConfig
from quire_decoder.core.dual_cache import Tuning
from quire_decoder.core.form_cache import Costs, Form, FormCache, KeptForm
from quire_decoder.core.published_cache import PublishedCache

_FORMS: Final = {"renditions": Form.RENDITION, "images": Form.IMAGE, "latents": Form.LATENT}
_AVERAGE_SHARE: Final = 0.05


class Cache:
    """Latent records, lossless images and renditions, by the digest of the record. Raises `ConfigInvalid`."""

    def __init__(self, config: DecoderConfig) -> None:
        names = [name.strip() for name in config.cache_forms.split(",") if name.strip()]
        if unknown := set(names) - set(_FORMS):
            raise ConfigInvalid(f"QUIRE_DECODER_CACHE_FORMS: {', '.join(unknown)}; there are {', '.join(_FORMS)}")
        self._forms = {_FORMS[name] for name in names}
        costs = Costs(0.04, 0.14)  # until some were measured
        self._cache: FormCache[bytes] | PublishedCache[bytes]
        if config.cache == "latentbox":
            self._forms = {Form.IMAGE, Form.LATENT}
            self._cache = PublishedCache(config.cache_bytes, costs, Tuning(window=config.cache_window))
        else:
            history = 1 << (config.cache_history - 1).bit_length()
            self._cache = FormCache(config.cache_bytes, costs, Random().random, history)
        self._bytes: dict[KeptForm[bytes], bytes] = {}
        self._bytes_per_pixel = 1.4  # of a lossless image, until some were seen

    @property
    def capacity_bytes(self) -> int:
        return self._cache.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all forms."""
        return self._cache.used_bytes

    @property
    def costs(self) -> Costs:
        """Costs of fetching, decoding and encoding here: they decide the worth of a form."""
        return self._cache.costs

    @property
    def stats(self) -> dict[str, float]:
        """Figures for `quire status`."""
        cache, total = self._cache, self._cache.total
        share = {"cache.alpha": cache.alpha} if isinstance(cache, PublishedCache) else {}
        return share | {
            "requests": total.requests,
            "hits.rendition": total.rendition_hits,
            "hits.image": total.image_hits,
            "hits.latent": total.latent_hits,
            "cache.bytes": cache.used_bytes,
            "cache.rendition_bytes": cache.bytes_of(Form.RENDITION),
            "cache.image_bytes": cache.bytes_of(Form.IMAGE),
            "cache.latent_bytes": cache.bytes_of(Form.LATENT),
            "decode_ms": cache.costs.decode_s * 1e3,
            "fetch_ms": cache.costs.fetch_s * 1e3,
            "encode_ms": cache.costs.encode_s * 1e3,
        }

    def look_up(self, entry: ImageEntry, variant: str) -> tuple[Form | None, bytes | None]:
        """Count a request, and find the nearest form to the requested one. `variant`: see `Rendering.variant`."""
        self._cache.look_up(entry.record_name, variant)
        self._drop_evicted()
        return self.find(entry, variant)

    @property
    def takes_new(self) -> bool:
        """Whether a new image is kept before its first request."""
        return isinstance(self._cache, FormCache)

    def announce(self, entry: ImageEntry) -> None:
        """An image is new: that counts as a use of it, not as a request."""
        self._cache.announce(entry.record_name)

    def find(self, entry: ImageEntry, variant: str) -> tuple[Form | None, bytes | None]:
        """The same; counts nothing."""
        key = entry.record_name
        nearest = (KeptForm(key, Form.RENDITION, variant),) if variant else ()
        for cached in (*nearest, KeptForm(key, Form.IMAGE), KeptForm(key, Form.LATENT)):
            if (data := self._bytes.get(cached)) is not None:
                return cached.form, data
        return None, None

    def wants_image(self, entry: ImageEntry) -> bool:
        """Return whether the lossless image of a decoded latent is worth making and keeping."""
        size = round(self._bytes_per_pixel * entry.height * entry.width)
        return Form.IMAGE in self._forms and self._cache.wants(KeptForm(entry.record_name, Form.IMAGE), size)

    def keep_latent(self, entry: ImageEntry, record: bytes) -> None:
        """A record was fetched; it is kept if its value for its size is high enough."""
        self._keep(KeptForm(entry.record_name, Form.LATENT), record)

    def keep_image(self, entry: ImageEntry, lossless: bytes) -> None:
        """Keep the lossless image of a decoded latent."""
        per_pixel = len(lossless) / (entry.height * entry.width)
        self._bytes_per_pixel += _AVERAGE_SHARE * (per_pixel - self._bytes_per_pixel)
        self._keep(KeptForm(entry.record_name, Form.IMAGE), lossless)

    def keep_rendition(self, entry: ImageEntry, variant: str, data: bytes) -> None:
        """The same for an encoded answer. `variant`: see `Rendering.variant`."""
        self._keep(KeptForm(entry.record_name, Form.RENDITION, variant), data)

    def forget_pixels(self) -> None:
        """Let images and renditions leave: they are of another build."""
        for cached in [cached for cached in self._bytes if cached.form is not Form.LATENT]:
            self._cache.remove(cached)
            self._bytes.pop(cached, None)
        self._drop_evicted()

    def _keep(self, cached: KeptForm[bytes], data: bytes) -> None:
        if cached.form in self._forms and self._cache.keep(cached, len(data)):
            self._bytes[cached] = data
        self._drop_evicted()

    def _drop_evicted(self) -> None:
        for evicted in self._cache.gone:
            self._bytes.pop(evicted, None)
        self._cache.gone.clear()
