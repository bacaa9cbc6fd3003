"""Parsing of a latent's PUT: its query, its headers, and the kind of its body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from quire.model.durability import Durability
from quire.model.errors import InvalidRequest, MediaUnsupported
from quire.model.images import ImageAttributes
from quire.model.latents import LatentInfo, RecordInvalid, Vae, Values, from_bytes, from_safetensors
from quire.model.nodes import KnownVae
from quire.model.pictures import READ_FORMATS, format_of
from quire.model.vaes import normalisation_of

METADATA: Final = "x-quire-meta-"
"""What headers with metadata begin with."""
PROVENANCE: Final = "X-Quire-Provenance"
OF_A_PUT: Final = (
    *("durability", "shape", "dtype", "height", "width", "vae_scale_factor", "scaling_factor", "shift_factor"),
    *("do_scaling", "vae", "revision", "weights_sha256", "allow_unknown_vae", "ttl", "background"),
)
"""What may be said of a latent, or a picture."""
_LENGTH_BYTES: Final = 8


def attributes_of(headers: Mapping[str, str], query: Mapping[str, str]) -> ImageAttributes:
    """Parse the details of a PUT: `ttl` in seconds; metadata and provenance in headers. Raises `InvalidRequest`."""
    named_so = [(name.lower(), value) for name, value in headers.items() if name.lower().startswith(METADATA)]
    metadata = tuple(sorted((name.removeprefix(METADATA), value) for name, value in named_so))
    return ImageAttributes(1000 * number(query, "ttl", 0), metadata, headers.get(PROVENANCE, ""))


def is_picture(kind: str, query: Mapping[str, str], body: bytes) -> bool:
    """Whether a body is a picture: by its type, or its first bytes where the type does not tell.

    Raises `MediaUnsupported` for formats that are not read, and for a body that is nothing that is stored here.
    """
    formats = ", ".join(READ_FORMATS)
    if kind == "application/octet-stream" and "shape" in query:
        return False
    name = format_of(body)
    if kind.startswith("image/") and name not in READ_FORMATS:
        raise MediaUnsupported(f"{name or kind} is not read; pictures are {formats}", field="body")
    if name and name not in READ_FORMATS:
        raise MediaUnsupported(f"{name} is not read; pictures are {formats}", field="body")
    if not name and int.from_bytes(body[:_LENGTH_BYTES], "little") > len(body):
        raise MediaUnsupported(
            f"neither safetensors nor a picture ({formats}); raw values need `shape` and the type "
            "application/octet-stream",
            field="body",
        )
    return bool(name)


def background_of(query: Mapping[str, str]) -> int:
    """The colour behind a picture's transparent pixels, as 0xRRGGBB; black by default. Raises `InvalidRequest`."""
    text = query.get("background", "000000")
    if not re.fullmatch("[0-9A-Fa-f]{6}", text):
        raise InvalidRequest(f"{text[:80]!r}; six hexadecimal digits, RRGGBB", field="background")
    return int(text, 16)


def values_of(query: Mapping[str, str], body: bytes, kind: str) -> tuple[Values, str]:
    """The latent of a body, and its dtype: safetensors, or bytes with `shape` and `dtype` in the query.

    Raises `RecordInvalid`.
    """
    if kind == "application/octet-stream" and "shape" in query:
        dtype = query.get("dtype", "float16")
        try:
            shape = tuple(int(size) for size in query["shape"].split(","))
        except ValueError:
            raise RecordInvalid(f"{query['shape']!r} is not channels,height,width", field="shape") from None
        if len(shape) == 4 and shape[0] == 1:
            shape = shape[1:]
        return from_bytes(body, shape, dtype), dtype  # type: ignore[arg-type]
    return from_safetensors(body)


def info_of(query: Mapping[str, str], shape: tuple[int, ...], dtype: str, vae: KnownVae | None) -> LatentInfo:
    """Parse the query, with the names of diffusers' remote_decode: scaling_factor, height and others.

    `vae`: the one that it names, if a decoder has it: its configuration is the default. Raises `InvalidRequest`.
    """
    scale = number(query, "vae_scale_factor", vae.scale if vae is not None else 8)
    normalisation = normalisation_of(
        vae,
        _float(query, "scaling_factor"),
        _float(query, "shift_factor"),
        undone=not flag(query, "do_scaling", default=True),
    )
    return LatentInfo(
        shape,  # type: ignore[arg-type]
        dtype,
        Vae(query.get("vae", ""), query.get("revision", ""), weights_of(query)),
        number(query, "height", shape[1] * scale),
        number(query, "width", shape[2] * scale),
        normalisation,
    )


def durability_of(name: str) -> Durability:
    """Return a durability by name. Raises `InvalidRequest`."""
    try:
        return Durability[name.upper()]
    except KeyError:
        raise InvalidRequest(f"{name!r}; memory, local, replicated or object", field="durability") from None


def flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    """True or false in a query. Raises `InvalidRequest`."""
    value = query.get(name, "").lower()
    if value in ("true", "1", "yes"):
        return True
    if value in ("false", "0", "no"):
        return False
    if value:
        raise InvalidRequest(f"{query[name]!r}; true or false", field=name)
    return default


def number(query: Mapping[str, str], name: str, default: int) -> int:
    """Zero or more in a query. Raises `InvalidRequest`."""
    try:
        value = int(query.get(name, default))
    except ValueError:
        raise InvalidRequest(f"{query[name]!r} is no number", field=name) from None
    if value < 0:
        raise InvalidRequest(f"{value} is negative", field=name)
    return value


def weights_of(query: Mapping[str, str]) -> str:
    """Return the digest of the weights of the VAE that a query names, "" for none."""
    return query.get("weights_sha256", "").lower()


def _float(query: Mapping[str, str], name: str) -> float | None:
    if name not in query:
        return None
    try:
        return float(query[name])
    except ValueError:
        raise InvalidRequest(f"{query[name]!r} is no number", field=name) from None
