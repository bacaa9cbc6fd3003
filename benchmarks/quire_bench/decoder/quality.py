"""Differences of two pictures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire_decoder.core.precision import error_of
from quire_decoder.ports import Pixels

_SSIM_SIGMA, _SSIM_WINDOW = 1.5, 11


def psnr(pixels: Pixels, reference: Pixels) -> float:
    """Peak signal-to-noise ratio, dB; infinite for equal pictures."""
    return error_of(pixels, reference).psnr_db


def ssim(pixels: Pixels, reference: Pixels) -> float:
    """Structural similarity, mean over channels and places (Wang et al. 2004: Gaussian window of 11, σ 1.5)."""
    x, y = pixels.astype(np.float64), reference.astype(np.float64)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    mean_x, mean_y = _blurred(x), _blurred(y)
    var_x, var_y = _blurred(x * x) - mean_x**2, _blurred(y * y) - mean_y**2
    covariance = _blurred(x * y) - mean_x * mean_y
    top = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return float((top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def _blurred(image: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Blur along both axes, without places where the window does not fit."""
    places = np.arange(_SSIM_WINDOW) - _SSIM_WINDOW // 2
    weights = np.exp(-(places**2) / (2 * _SSIM_SIGMA**2))
    weights /= weights.sum()
    for axis in (0, 1):
        windows = np.lib.stride_tricks.sliding_window_view(image, _SSIM_WINDOW, axis=axis)
        image = windows @ weights
    return image
