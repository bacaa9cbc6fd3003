"""Number formats of decoding: the record's, or the quickest whose pictures stay near those of float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

RECORD: Final = "record"
AUTO: Final = "auto"
DTYPES: Final = ("float32", "float16", "bfloat16")
CHOICES: Final = (RECORD, AUTO, *DTYPES)
_PSNR_MIN_DB: Final = 40.0
"""Of `auto`: pictures that are further from those of float32 are not taken."""


@dataclass(frozen=True, slots=True)
class PrecisionError:
    """Difference of a decoded picture from float32's: PSNR in dB, infinite for equal ones, and the largest, of 255."""

    psnr_db: float
    error_max: int

    @property
    def is_small(self) -> bool:
        """Return whether `auto` takes the format."""
        return self.psnr_db >= _PSNR_MIN_DB


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


def error_of(pixels: npt.NDArray[np.uint8], exact: npt.NDArray[np.uint8], *, is_finite: bool) -> PrecisionError:
    """Compare a picture with that of float32. `is_finite`: whether all samples were finite before they were clamped."""
    if not is_finite:
        return PrecisionError(0.0, 255)
    errors = np.abs(pixels.astype(np.int16) - exact)
    square = float(np.mean(np.square(errors, dtype=np.float64)))
    return PrecisionError(float("inf") if not square else 10 * float(np.log10(255**2 / square)), int(errors.max()))
