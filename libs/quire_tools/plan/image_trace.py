"""Access traces of generated images: read from a file, or made up with LatentBox's published statistics (§3.1).

No public trace exists. The generator draws views per image from a quantile function that bends where the paper says,
lets them fall off with age, and adds bursts; it prints how close it came to each published figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.model.errors import InvalidRequest

Array = npt.NDArray[Any]
DAY_S: Final = 86_400.0
SPAN_S: Final = 1049 * DAY_S
IMAGE_BYTES: Final = 1_404_000  # SD 3.5 at 1024 × 1024: 210.6 GB / 150K (Table 3)
LATENT_BYTES: Final = 277_000  # 41.5 GB / 150K

# Of all images, ordered by their views: up to which share they have at most how many. Log-linear in between.
_QUANTILES: Final = ((0.0, 1.0), (0.15, 1.0), (0.1501, 2.0), (0.69, 9.49), (0.90, 37.0), (0.99, 195.0))
_HEAD_SLOPE: Final = 1.11
_VIEWS_MAX: Final = 9_000.0
_DECAY_DAYS, _DECAY_POWER = 2.2, 0.92
_BURST_SHARE, _BURST_S = 0.10, 900.0

PUBLISHED: Final[Mapping[str, float]] = {
    "views of the top 1%": 0.39,
    "views of the top 10%": 0.71,
    "images under ten views": 0.69,
    "images viewed once": 0.15,
    "views per image": 22.4,
    "rank-size slope of the head": 1.11,
    "re-accesses within an hour": 0.38,
    "re-accesses within a day": 0.68,
    "re-accesses beyond 30 days": 0.06,
    "fall of the top 1%'s rate in a year": 100.0,
}


@dataclass(frozen=True, slots=True)
class ImageTrace:
    """Requests in order of time. `objects` index `image_bytes` and `latent_bytes`; `births` in seconds, if known."""

    times: npt.NDArray[np.float64]
    objects: npt.NDArray[np.int64]
    image_bytes: npt.NDArray[np.int64]
    latent_bytes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.times)

    @property
    def working_set_bytes(self) -> int:
        """Bytes of all objects that occur, as images."""
        return int(self.image_bytes[np.unique(self.objects)].sum())


def read_trace(file: Path) -> ImageTrace:
    """CSV with a header: time_s, object_id and optionally image_bytes, latent_bytes. Raises `InvalidRequest`."""
    import csv

    times, names, images, latents = [], [], [], []
    try:
        with file.open(newline="") as lines:
            for number, row in enumerate(csv.DictReader(lines), 2):
                try:
                    times.append(float(row["time_s"]))
                    names.append(row["object_id"])
                    images.append(int(row.get("image_bytes") or IMAGE_BYTES))
                    latents.append(int(row.get("latent_bytes") or LATENT_BYTES))
                    if min(images[-1], latents[-1]) <= 0 or not names[-1] or not np.isfinite(times[-1]):
                        raise ValueError("sizes must be positive, times finite, ids not empty")
                except (KeyError, TypeError, ValueError) as error:
                    raise InvalidRequest(f"{file}, line {number}: {error!r}", field="trace") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file}: {error}", field="trace") from None
    if not times:
        raise InvalidRequest(f"{file} is empty", field="trace")
    unique, first, objects = np.unique(np.array(names), return_index=True, return_inverse=True)
    del unique
    order = np.argsort(np.array(times), kind="stable")
    return ImageTrace(
        np.array(times)[order],
        objects[order].astype(np.int64),
        np.array(images, dtype=np.int64)[first],
        np.array(latents, dtype=np.int64)[first],
    )


def generate(images: int, seed: int = 1, span_s: float = SPAN_S) -> ImageTrace:
    """About 22 requests per image over 35 months (or `span_s`). Raises `InvalidRequest` for less than 1,000 images."""
    if images < 1000 or span_s <= 0:
        raise InvalidRequest(f"{images} images, {span_s} s", field="images")
    rng = np.random.default_rng(seed)
    views = _views(images, rng)
    births = rng.uniform(0, span_s, images)
    objects = np.repeat(np.arange(images), views)
    # Ages of views: a heavy-tailed fall from the birth on, cut off where the trace ends.
    lifetime_days = (span_s - births[objects]) / DAY_S
    ages = _ages(rng.random(len(objects)), lifetime_days) * DAY_S
    starts = np.concatenate(([0], np.cumsum(views)[:-1]))
    # Bursts: some views follow another of the same image within minutes.
    bursts = np.flatnonzero(rng.random(len(objects)) < _BURST_SHARE)
    leaders = starts[objects[bursts]] + (rng.random(len(bursts)) * views[objects[bursts]]).astype(np.int64)
    ages[bursts] = ages[leaders] + rng.exponential(_BURST_S, len(bursts))
    ages[starts] = 0.0  # born with its first view
    times = np.minimum(births[objects] + ages, span_s)
    order = np.argsort(times, kind="stable")
    sizes = rng.lognormal(0.0, 0.25, images)
    return ImageTrace(
        times[order],
        objects[order],
        np.maximum(1, (IMAGE_BYTES * sizes / np.exp(0.25**2 / 2)).astype(np.int64)),
        np.maximum(1, (LATENT_BYTES * rng.lognormal(0.0, 0.08, images)).astype(np.int64)),
    )


def statistics(trace: ImageTrace) -> dict[str, float]:
    """Return the figures of `PUBLISHED`, of this trace."""
    views = np.bincount(trace.objects)
    views = views[views > 0]
    ordered = np.sort(views)[::-1]
    order = np.lexsort((trace.times, trace.objects))
    same = trace.objects[order][1:] == trace.objects[order][:-1]
    gaps = np.diff(trace.times[order])[same]
    head = ordered[: max(10, len(ordered) // 100)].astype(np.float64)
    middle = slice(len(head) // 10, len(head))
    ranks = np.arange(1, len(head) + 1)
    fit = np.asarray(np.polyfit(np.log(ranks[middle]), np.log(head[middle]), 1))
    return {
        "views of the top 1%": float(ordered[: len(ordered) // 100].sum() / ordered.sum()),
        "views of the top 10%": float(ordered[: len(ordered) // 10].sum() / ordered.sum()),
        "images under ten views": float((views < 10).mean()),
        "images viewed once": float((views == 1).mean()),
        "views per image": float(views.mean()),
        "rank-size slope of the head": -float(fit[0]),
        "re-accesses within an hour": float((gaps <= 3600).mean()),
        "re-accesses within a day": float((gaps <= DAY_S).mean()),
        "re-accesses beyond 30 days": float((gaps > 30 * DAY_S).mean()),
        "fall of the top 1%'s rate in a year": _fall(trace, order),
    }


def _fall(trace: ImageTrace, order: Array) -> float:
    """Return the mean daily rate of the top 1% in their first three days over that of days 350 to 380.

    Only images that lived as long count.
    """
    views = np.bincount(trace.objects)
    top = np.zeros(len(views), dtype=bool)
    count = max(10, int(np.count_nonzero(views)) // 100)
    top[np.argsort(views)[len(views) - count :]] = True
    objects, times = trace.objects[order], trace.times[order]
    starts = np.flatnonzero(np.concatenate(([True], objects[1:] != objects[:-1])))
    births = np.zeros(len(views))
    births[objects[starts]] = times[starts]
    old = top & (births < trace.times[-1] - 380 * DAY_S)
    ages = (times - births[objects])[old[objects]] / DAY_S
    late = np.count_nonzero((ages >= 350) & (ages < 380)) / 30
    return float(np.count_nonzero(ages < 3) / 3 / late) if late else float("nan")


def _views(images: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    shares, counts = np.array(_QUANTILES).T
    quantiles = (np.arange(images) + rng.random(images)) / images
    body = np.exp(np.interp(quantiles, shares, np.log(counts)))
    head = counts[-1] * ((1 - shares[-1]) / np.maximum(1e-12, 1 - quantiles)) ** _HEAD_SLOPE
    views = np.where(quantiles > shares[-1], np.minimum(head, _VIEWS_MAX), body)
    return rng.permutation(np.maximum(1, np.floor(views + rng.random(images) * (views >= 2))).astype(np.int64))


def _ages(quantiles: Array, lifetime_days: Array) -> Array:
    """Days: density ∝ (1 + t/t0)^-p from 0 to the end of the trace, by inversion."""
    power = 1 - _DECAY_POWER
    end = (1 + lifetime_days / _DECAY_DAYS) ** power
    return _DECAY_DAYS * ((1 + quantiles * (end - 1)) ** (1 / power) - 1)
