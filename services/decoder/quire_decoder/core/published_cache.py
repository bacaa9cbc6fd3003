"""LatentBox's published cache (§4.2 and §4.3) for the decoder: `DualCache` with the calls of `FormCache`.

It has two forms, latents and lossless images; an object is kept in one of them. Renditions are not kept.
"""

from __future__ import annotations

from typing import Final, Generic

from quire_decoder.core.dual_cache import Costs as DualCosts
from quire_decoder.core.dual_cache import DualCache, Outcome, Tuning
from quire_decoder.core.form_cache import Costs, Counters, Form, KeptForm
from quire_decoder.core.reuse import Item

ALPHA: Final = 0.5
"""Share of the images at first."""


class PublishedCache(Generic[Item]):
    """Keys and sizes only: the holder of the bytes reads the evicted ones from `gone`, and empties it.

    `costs` are measured by the caller, as for `FormCache`; encoding is no part of Eq. 2.
    """

    def __init__(self, capacity_bytes: int, costs: Costs, tuning: Tuning) -> None:
        self.costs = costs
        self.total = Counters()
        self.gone: list[KeptForm[Item]] = []
        self._dual: DualCache[Item] = DualCache(
            capacity_bytes, ALPHA, tuning, DualCosts(costs.decode_s, costs.fetch_s, fixed=True)
        )
        self._forms: dict[Item, Form] = {}
        self._promoted: set[Item] = set()

    @property
    def capacity_bytes(self) -> int:
        """Bytes of both tiers."""
        return self._dual.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._dual.images.used_bytes + self._dual.latents.used_bytes

    @property
    def alpha(self) -> float:
        """Share of the images."""
        return self._dual.alpha

    def __contains__(self, item: KeptForm[Item]) -> bool:
        return self._forms.get(item.key) is item.form and not item.rendition

    def __len__(self) -> int:
        return len(self._forms)

    def bytes_of(self, form: Form) -> int:
        """Return the bytes that are kept in that form."""
        if form is Form.RENDITION:
            return 0
        return (self._dual.images if form is Form.IMAGE else self._dual.latents).used_bytes

    def look_up(self, key: Item, rendition: str = "") -> Form | None:
        """Count a request, and return the form that is kept. At its h-th hit a latent becomes worth promoting."""
        self._dual.costs.decode_s, self._dual.costs.fetch_s = self.costs.decode_s, self.costs.fetch_s
        self.total.requests += 1
        outcome = self._dual.look_up(key)
        self._take_gone()
        if outcome is Outcome.IMAGE:
            self.total.image_hits += 1
            return Form.IMAGE
        if outcome is Outcome.MISS:
            return None
        self.total.latent_hits += 1
        if outcome is Outcome.PROMOTE:
            self._promoted.add(key)
        return Form.LATENT

    def announce(self, key: Item) -> None:
        """Do nothing: an object enters the latent tier when it is first fetched."""

    def wants(self, item: KeptForm[Item], size: int) -> bool:
        """Whether it would be kept now: a latent that is fetched, or the image of a latent to promote."""
        if item.form is Form.LATENT:
            return item.key not in self._forms
        return item.form is Form.IMAGE and item.key in self._promoted and self._dual.has_room(size)

    def keep(self, item: KeptForm[Item], size: int) -> bool:
        """Take a form in; whether it is here now. An image takes the place of its latent."""
        if item in self:
            return True
        if not self.wants(item, size):
            return False
        if item.form is Form.LATENT:
            self._dual.fetched(item.key, size)
            self._forms[item.key] = Form.LATENT
        else:
            self._promoted.discard(item.key)
            if not self._dual.promote(item.key, size):
                self._take_gone()
                return False
            self.gone.append(KeptForm(item.key, Form.LATENT))
            self._forms[item.key] = Form.IMAGE
        self._take_gone()
        return item in self

    def remove(self, item: KeptForm[Item]) -> None:
        """Remove it, if it is here."""
        if item in self:
            self._dual.forget(item.key)
            self._take_gone()

    def _take_gone(self) -> None:
        """Name the forms that have left a tier."""
        for key in self._dual.gone:
            self._promoted.discard(key)
            form = self._forms.pop(key, None)
            if form is not None:
                self.gone.append(KeptForm(key, form))
        self._dual.gone.clear()
