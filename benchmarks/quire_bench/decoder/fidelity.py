"""`quire bench images --storage`: bytes by format, and what comes back (LatentBox, Table 3 and Figure 12).

On latents at hand: pictures by formula and a photograph, encoded by the demo's VAE. Another VAE, and other pictures,
have other ratios; the method is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import imagecodecs
import numpy as np
from rich.progress import track

from quire.model.latents import LatentInfo, Values, decode_record, denormalised, encode_record
from quire_bench.decoder.quality import psnr, ssim
from quire_decoder.adapters.engines import make_engine
from quire_decoder.adapters.vae import DiffusersVaes, VaeSettings
from quire_decoder.adapters.weights import find_weights
from quire_decoder.ports import Pixels
from quire_tools.local.pictures import VAE_FOLDER, encode, pictures
from quire_tools.report import Report, Row

_QUALITIES: Final = (50, 75, 90, 95, 99)
_CODECS: Final[dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]]] = {
    "JPEG": (lambda pixels, q: imagecodecs.jpeg_encode(pixels, level=q), imagecodecs.jpeg_decode),
    "WebP": (lambda pixels, q: imagecodecs.webp_encode(pixels, level=q, lossless=False), imagecodecs.webp_decode),
    "AVIF": (lambda pixels, q: imagecodecs.avif_encode(pixels, level=q, speed=8), imagecodecs.avif_decode),
}

Step = Callable[[], tuple[list[int], list[Pixels] | None]]
"""Bytes of each picture's file, and what comes back, if it is not the same."""


def run(count: int, size: int, show_progress: bool = True) -> Report:
    """Rows: a format each; bytes per image, and PSNR and SSIM against the reference decode (float32, eager)."""
    report = Report("images --storage", {"name": "PNG of the reference decode", "unit": "bytes per image"}, tall=True)
    latents = encode(pictures(count, size))
    reference = _decodes(latents, "eager", "float32")
    steps: list[tuple[str, Step]] = [
        ("PNG", lambda: ([len(imagecodecs.png_encode(each, level=9)) for each in reference], reference)),
        ("WebP, lossless", lambda: ([len(imagecodecs.webp_encode(each, lossless=True)) for each in reference], None)),
        ("latent, raw", lambda: ([values.nbytes for values, _ in latents], None)),
    ]
    records = [encode_record(values, info) for values, info in latents]
    again, sizes = [decode_record(record) for record in records], list(map(len, records))

    def decoded(engine: str, dtype: str) -> Step:
        return lambda: (sizes, _decodes(again, engine, dtype))

    def lossy(name: str, quality: int) -> Step:
        return lambda: _lossy(reference, *_CODECS[name], quality)

    steps += [
        ("latent, pcodec", decoded("eager", "float32")),
        ("… channels_last", decoded("channels_last", "float32")),
        ("… decoded in bfloat16", decoded("eager", "bfloat16")),
        ("… decoded in float16", decoded("eager", "float16")),
        *((f"{name} q{quality}", lossy(name, quality)) for name in _CODECS for quality in _QUALITIES),
    ]
    base = 0.0
    for name, step in track(steps, "formats", disable=not show_progress, transient=True):
        lengths, back = step()
        mean = float(np.mean(lengths))
        base = base or mean
        measured = {"bytes": mean, "of the PNG, %": 100 * mean / base}
        measured |= {"PSNR, dB": float("nan"), "SSIM": float("nan"), "equal values, %": float("nan")}
        if back is not None:
            pairs = list(zip(reference, back, strict=True))
            measured["PSNR, dB"] = float(np.mean([min(99.0, psnr(*pair)) for pair in pairs]))
            measured["SSIM"] = float(np.mean([ssim(*pair) for pair in pairs]))
            measured["equal values, %"] = 100 * float(np.mean([(one == other).mean() for one, other in pairs]))
        report.rows.append(Row({"format": name}, measured, base, base / mean))
    report.notes += [
        f"{count} pictures of {size} × {size} (a photograph, landscapes by formula), the demo's VAE, float16 latents; "
        "PSNR of equal pictures counts as 99 dB; the other devices of Figure 12 were not at hand",
        "PNG at level 9; the reference is the decode in float32, eager, on the CPU",
    ]
    return report


def _decodes(latents: Sequence[tuple[Values, LatentInfo]], engine: str, dtype: str) -> list[Pixels]:
    vaes = DiffusersVaes(find_weights([VAE_FOLDER]), make_engine(engine, "cpu"), VaeSettings())
    made = []
    for values, info in latents:
        asked = replace(info, decode=replace(info.decode, dtype=dtype))
        made.append(vaes.decode([denormalised(values, info)], asked).pixels[0])
    return made


def _lossy(
    reference: Sequence[Pixels], write: Callable[..., Any], read: Callable[[Any], Any], quality: int
) -> tuple[list[int], list[Pixels]]:
    files = [write(np.ascontiguousarray(pixels), quality) for pixels in reference]
    return list(map(len, files)), [np.asarray(read(file), dtype=np.uint8) for file in files]
