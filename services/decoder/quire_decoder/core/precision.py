"""Number formats of decoding: the record's, or the quickest whose pictures stay near those of float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

RECORD: Final = "record"
AUTO: Final = "auto"
DTYPES: Final = ("float32", "float16", "bfloat16")
CHOICES: Final = (RECORD, AUTO, *DTYPES)
Pixels = npt.NDArray[np.uint8]
_PSNR_MIN_DB: Final = 40.0
"""Of `auto`: pictures that are further from those of float32 are not taken."""


@dataclass(frozen=True, slots=True)
class PictureError:
    """Difference of two pictures: PSNR in dB, infinite for equal ones, and the largest of a channel's value, of 255."""

    psnr_db: float
    error_max: int


def is_small(error: PictureError) -> bool:
    """Return whether `auto` takes a format with this error."""
    return error.psnr_db >= _PSNR_MIN_DB


def candidates(choice: str, *, record: str, force_upcast: bool, device_type: str) -> Sequence[str]:
    """Return the formats to try, the preferred one first. The last one is taken whatever its error.

    Args:
        choice: One of `CHOICES`.
        record: What the record says.
        force_upcast: Whether the VAE's configuration says that float16 overflows in it.
        device_type: "cuda" or "cpu"; processors compute quickest in float32.
    """
    if choice == RECORD:
        return (record,)
    if choice != AUTO:
        return (choice,)
    if device_type != "cuda":
        return ("float32",)
    return ("bfloat16", "float32") if force_upcast else ("float16", "bfloat16", "float32")


def error_of(pixels: Pixels, reference: Pixels) -> PictureError:
    """Compare two pictures of one shape."""
    errors = np.abs(pixels.astype(np.int16) - reference)
    square = float(np.mean(np.square(errors, dtype=np.float64)))
    return PictureError(10 * math.log10(255**2 / square) if square else math.inf, int(errors.max()))
