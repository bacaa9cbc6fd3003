"""Choice of the forms of images to keep: latents, lossless images and renditions in one budget.

All of them compete by the saving of a byte: the rate at which an image is requested (`core.reuse`), times the seconds
that having the form saves, by its size. A latent saves the fetch, an image the decode, a rendition its encoding, and
the decode where no image is kept. The form that saves least leaves first, so that the last byte of every form saves as
much as that of the others: where LatentBox's tuner moves its split to (§4.3, Eq. 2), for three forms and for each
object separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from operator import itemgetter
from typing import Final, Generic, NamedTuple

from quire_decoder.core.reuse import Item, Reuse

_SAMPLED: Final = 64
"""Of so many kept forms, drawn at random, the one that saves least leaves."""
_AVERAGE_SHARE: Final = 0.05


class Form(IntEnum):
    """Form of a kept image."""

    RENDITION = 0
    IMAGE = 1
    LATENT = 2


class KeptForm(NamedTuple, Generic[Item]):
    """A form of an image. `rendition`: which of them, "" for the other forms."""

    key: Item
    form: Form
    rendition: str = ""


@dataclass(slots=True)
class Costs:
    """Seconds: moving averages of measurements. `fixed`: they stay unchanged."""

    decode_s: float
    fetch_s: float
    encode_s: float = 0.01
    fixed: bool = False

    def decoded(self, seconds: float) -> None:
        """Learn from the time of a decode."""
        self.decode_s = self._next(self.decode_s, seconds)

    def fetched(self, seconds: float) -> None:
        self.fetch_s = self._next(self.fetch_s, seconds)

    def encoded(self, seconds: float) -> None:
        """Learn from the time of an encoding."""
        self.encode_s = self._next(self.encode_s, seconds)

    def _next(self, previous: float, seconds: float) -> float:
        return previous if self.fixed else previous + _AVERAGE_SHARE * (seconds - previous)


@dataclass(slots=True)
class Counters:
    """Counts of a lifetime."""

    requests: int = 0
    rendition_hits: int = 0
    image_hits: int = 0
    latent_hits: int = 0


@dataclass(slots=True)
class FormCache(Generic[Item]):
    """Keys and sizes only: the holder of the bytes reads the evicted ones from `gone`, and empties it.

    `history`: uses that rates are learnt from, a power of two. `draw`: random numbers from 0 up to 1.
    """

    capacity_bytes: int
    costs: Costs
    draw: Callable[[], float]
    history: int = 1 << 16
    total: Counters = field(default_factory=Counters)
    gone: list[KeptForm[Item]] = field(default_factory=list)
    used_bytes: int = 0
    _reuse: Reuse[tuple[Item, str]] = field(init=False)
    _items: list[KeptForm[Item]] = field(default_factory=list)
    _place: dict[KeptForm[Item], int] = field(default_factory=dict)
    _size: dict[KeptForm[Item], int] = field(default_factory=dict)
    _bytes: list[int] = field(default_factory=lambda: [0] * len(Form))

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0:
            raise ValueError(f"{self.capacity_bytes} bytes")
        self._reuse = Reuse(self.history, 2)

    def __contains__(self, item: KeptForm[Item]) -> bool:
        return item in self._place

    def __len__(self) -> int:
        return len(self._items)

    def bytes_of(self, form: Form) -> int:
        """Return the bytes that are kept in that form."""
        return self._bytes[form]

    def look_up(self, key: Item, rendition: str = "") -> Form | None:
        """Count a request, for the image itself or for a rendition, and return the best kept form."""
        total = self.total
        total.requests += 1
        if rendition:
            self._reuse.use((key, rendition), 0)
            if KeptForm(key, Form.RENDITION, rendition) in self._place:
                total.rendition_hits += 1
                return Form.RENDITION
        self._reuse.use((key, ""), 1)  # what renditions answered says nothing for an image
        if KeptForm(key, Form.IMAGE) in self._place:
            total.image_hits += 1
            return Form.IMAGE
        if KeptForm(key, Form.LATENT) in self._place:
            total.latent_hits += 1
            return Form.LATENT
        return None

    def announce(self, key: Item) -> None:
        """Add a new object: the rate of objects that were used once holds for it."""
        self._reuse.use((key, ""), 1)

    def wants(self, item: KeptForm[Item], size: int) -> bool:
        """Whether it would be kept now: worth asking before it is made at a cost."""
        if item in self._place or size > self.capacity_bytes:
            return False
        return self.used_bytes + size <= self.capacity_bytes or self._worst()[0] < self._worth(item, size)

    def keep(self, item: KeptForm[Item], size: int) -> bool:
        """Take a form in, at the cost of what saves less; whether it is here now."""
        if item in self._place:
            return True
        if size > self.capacity_bytes:
            return False
        worth = self._worth(item, size)
        while self.used_bytes + size > self.capacity_bytes:
            least, worst = self._worst()
            if least >= worth:
                return False
            self.remove(worst)
        self._place[item] = len(self._items)
        self._items.append(item)
        self._size[item] = size
        self._bytes[item.form] += size
        self.used_bytes += size
        return True

    def remove(self, item: KeptForm[Item]) -> None:
        """Remove it, if it is here."""
        place = self._place.pop(item, None)
        if place is None:
            return
        last = self._items.pop()
        if last is not item and place < len(self._items):
            self._items[place] = last
            self._place[last] = place
        size = self._size.pop(item)
        self._bytes[item.form] -= size
        self.used_bytes -= size
        self.gone.append(item)

    def _worst(self) -> tuple[float, KeptForm[Item]]:
        items, draw = self._items, self.draw
        count = len(items)
        sample = [items[int(draw() * count)] for _ in range(_SAMPLED)] if count > _SAMPLED else items
        return min(((self._worth(item, self._size[item]), item) for item in sample), key=itemgetter(0))

    def _worth(self, item: KeptForm[Item], size: int) -> float:
        """Seconds that a byte of it saves, per event."""
        key, form, rendition = item
        if form is Form.LATENT:
            saves_s = self.costs.fetch_s
        elif form is Form.IMAGE:
            saves_s = self.costs.decode_s
        else:
            saves_s = self.costs.encode_s
            if KeptForm(key, Form.IMAGE) not in self._place:
                saves_s += self.costs.decode_s
        return self._reuse.rate((key, rendition)) * saves_s / size
