"""Formats of pictures, which are stored as latents, and how each begins."""

from __future__ import annotations

from typing import Final

READ_FORMATS: Final = ("png", "jpeg", "webp", "avif", "tiff", "gif")
"""Of these the first frame is read."""
_SIGNATURES: Final = (
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"\xff\xd8\xff", "jpeg"),
    (8, b"WEBP", "webp"),
    (4, b"ftypavif", "avif"),
    (4, b"ftypavis", "avif"),
    (0, b"II*\x00", "tiff"),
    (0, b"MM\x00*", "tiff"),
    (0, b"GIF8", "gif"),
    (4, b"ftyphei", "heic"),
    (4, b"ftypmif1", "heif"),
    (0, b"\x00\x00\x00\x0cJXL ", "jxl"),
    (0, b"<svg", "svg"),
    (0, b"<?xml", "xml"),
)
"""Of no safetensors file: those begin with a length below 2^24."""


def format_of(file: bytes) -> str:
    """Return the format that a file begins as, "" for one that is not known here."""
    return next((name for at, sign, name in _SIGNATURES if file[at : at + len(sign)] == sign), "")
