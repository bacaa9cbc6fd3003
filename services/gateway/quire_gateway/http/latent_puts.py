"""Parsing of a latent's PUT: its query, its headers, and the values in its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.model.durability import Durability
from quire.model.errors import InvalidRequest
from quire.model.images import ImageAttributes
from quire.model.latents import LatentInfo, Normalisation, RecordInvalid, Vae, Values, from_bytes, from_safetensors

METADATA: Final = "x-quire-meta-"
"""What headers with metadata begin with."""
PROVENANCE: Final = "X-Quire-Provenance"
OF_A_PUT: Final = (
    *("durability", "shape", "dtype", "height", "width", "vae_scale_factor", "scaling_factor", "shift_factor"),
    *("do_scaling", "vae", "revision", "weights_sha256", "allow_unknown_vae", "ttl"),
)
"""What may be said of a latent."""


def attributes_of(headers: Mapping[str, str], query: Mapping[str, str]) -> ImageAttributes:
    """Parse the details of a PUT: `ttl` in seconds; metadata and provenance in headers. Raises `InvalidRequest`."""
    named_so = [(name.lower(), value) for name, value in headers.items() if name.lower().startswith(METADATA)]
    metadata = tuple(sorted((name.removeprefix(METADATA), value) for name, value in named_so))
    return ImageAttributes(1000 * number(query, "ttl", 0), metadata, headers.get(PROVENANCE, ""))


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


def info_of(query: Mapping[str, str], shape: tuple[int, ...], dtype: str) -> LatentInfo:
    """Parse the query, with the names of diffusers' remote_decode: scaling_factor, height and others."""
    scale = number(query, "vae_scale_factor", 8)
    normalisation = Normalisation(
        _float(query, "scaling_factor", 1.0),
        _float(query, "shift_factor", 0.0),
        undone=not flag(query, "do_scaling", default=True),
    )
    vae = Vae(query.get("vae", ""), query.get("revision", ""), query.get("weights_sha256", "").lower())
    return LatentInfo(
        shape,  # type: ignore[arg-type]
        dtype,
        vae,
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


def _float(query: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(query.get(name, default))
    except ValueError:
        raise InvalidRequest(f"{query[name]!r} is no number", field=name) from None
