"""Formats of pictures, which are stored as latents, and how each begins."""

from __future__ import annotations

from typing import Final

READ_FORMATS: Final = ("png", "jpeg", "webp", "avif", "tiff", "gif")
"""Of these the first frame is read."""
_SIGNATURES: Final = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"II+\x00", "tiff"),
    (b"MM\x00+", "tiff"),
    (b"GIF8", "gif"),
    (b"\x00\x00\x00\x0cJXL ", "jxl"),
    (b"<svg", "svg"),
    (b"<?xml", "xml"),
)
"""No latent begins so: the length that a safetensors file begins with would be above `HEADER_BYTES_MAX`."""
_BRANDS_BYTES: Final = 64


def format_of(file: bytes) -> str:
    """Return the format that a file begins as, "" for one that is not known here."""
    if file[:4] == b"RIFF" and file[8:12] == b"WEBP":
        return "webp"
    if file[4:8] == b"ftyp":
        brands = file[8:_BRANDS_BYTES]
        return "avif" if b"avif" in brands or b"avis" in brands else "heif"
    return next((name for signature, name in _SIGNATURES if file.startswith(signature)), "")
