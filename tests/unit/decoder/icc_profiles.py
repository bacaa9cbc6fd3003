"""ICC profiles, made by hand: primaries and a gamma, version 2."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ADOBE_RGB = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
"""XYZ of red, green and blue, adapted to D50."""
_SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))
_D50 = (0.9642, 1.0, 0.8249)


def rgb_profile(primaries: Sequence[Sequence[float]], gamma: float) -> bytes:
    tags = {b"wtpt": _xyz(_D50), b"desc": _text(b"made by hand"), b"cprt": b"text\0\0\0\0none\0"}
    for name, primary in zip(b"rgb", primaries, strict=True):
        tags[bytes([name]) + b"XYZ"] = _xyz(primary)
        tags[bytes([name]) + b"TRC"] = _curve(gamma)
    return _profile(b"RGB ", tags)


def grey_profile(gamma: float) -> bytes:
    tags = {b"wtpt": _xyz(_D50), b"desc": _text(b"grey"), b"cprt": b"text\0\0\0\0none\0", b"kTRC": _curve(gamma)}
    return _profile(b"GRAY", tags)


def in_srgb(
    pixels: npt.NDArray[np.uint8], primaries: Sequence[Sequence[float]], gamma: float
) -> npt.NDArray[np.float64]:
    """Return what 8-bit values of such a profile are in sRGB, of 255, clipped to its gamut."""
    linear = (pixels / 255.0) ** gamma @ np.array(primaries) @ np.linalg.inv(np.array(_SRGB))
    return encoded(linear)


def encoded(linear: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Apply the curve of sRGB."""
    linear = linear.clip(0.0, 1.0)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.asarray(255 * curved, dtype=np.float64)


def _profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    table, data = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        table += name + struct.pack(">II", start + len(data), len(content))
        data += content + bytes(-len(content) % 4)
    header = struct.pack(">I4sI4s4s4s", start + len(data), b"lcms", 0x02400000, b"mntr", space, b"XYZ ")
    header += bytes(12) + b"acsp" + bytes(28) + _xyz(_D50)[8:] + bytes(48)
    return header + table + data


def _xyz(values: Sequence[float]) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(value * 65536) for value in values))


def _curve(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))


def _text(text: bytes) -> bytes:
    return b"desc\0\0\0\0" + struct.pack(">I", len(text) + 1) + text + b"\0" + bytes(78)
