"""How a request over HTTP wants an image: its query, and what it accepts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from quire.model.errors import InvalidRequest
from quire.model.images import MEDIA_TYPES, Fit, Gravity, Rendering
from quire_gateway.errors import NotAcceptable, ParameterUnknown

_ALIASES: Final = {"f": "format", "fm": "format", "q": "quality", "w": "width", "h": "height"}
_NAMES: Final = ("format", "quality", "width", "height", "fit", "gravity", "dpr", "enlarge")
_FORMATS: Final = {"jpg": "jpeg"}
_DPR_MAX: Final = 8.0
_NEGOTIATED: Final = {"avif": 70, "webp": 82, "jpeg": 85}
"""Quality of what a client accepts but did not name: good for the eye."""
_WILD: Final = ("png", "jpeg", "webp", "avif")
"""What is sent to a client that takes anything, best first."""
Value = TypeVar("Value")


def read_rendering(query: Sequence[tuple[str, str]], accept: str) -> Rendering:
    """Raises `InvalidRequest`, `ParameterUnknown`, `NotAcceptable`. Without `format` the best that is accepted."""
    given = named(query, _NAMES, _ALIASES)
    dpr = _value(given, "dpr", float, 1.0)
    if not (math.isfinite(dpr) and 0 < dpr <= _DPR_MAX):
        raise InvalidRequest(f"{dpr} is not above 0 and up to {_DPR_MAX:g}", field="dpr")
    rendering = Rendering(
        quality=_value(given, "quality", int, 0),
        width=round(_value(given, "width", int, 0) * dpr),
        height=round(_value(given, "height", int, 0) * dpr),
        fit=_value(given, "fit", Fit, Fit.CONTAIN),
        gravity=_value(given, "gravity", Gravity, Gravity.CENTER),
        enlarge=_value(given, "enlarge", _flag, False),
    )
    if wanted := given.get("format", "").lower():
        return replace(rendering, format=_FORMATS.get(wanted, wanted))
    name = accepted(accept)
    quality = rendering.quality or (0 if name == "png" else _NEGOTIATED[name])
    return replace(rendering, format=name, quality=quality)


def named(
    query: Iterable[tuple[str, str]], names: Sequence[str], aliases: Mapping[str, str] | None = None
) -> dict[str, str]:
    """A query by its parameters' names. Raises `ParameterUnknown`, and `InvalidRequest` for one that is given twice."""
    given: dict[str, str] = {}
    for written, value in query:
        name = (aliases or {}).get(written, written)
        if name not in names:
            raise ParameterUnknown(f"{written!r}; there are {', '.join(names)}", field=written[:80])
        if name in given:
            raise InvalidRequest("is given twice", field=name)
        given[name] = value
    return given


def accepted(header: str) -> str:
    """The format that a client likes best: by q, then those that it names itself in its order, then what we have.

    Raises `NotAcceptable` where it takes none that there is.
    """
    if not header.strip():
        return _WILD[0]
    ranges = [_range(part) for part in header.split(",") if part.strip()]
    named_formats = {media: name for name, media in MEDIA_TYPES.items()}
    liked = {named_formats[media]: q for media, q in ranges if media in named_formats}
    order = [named_formats[media] for media, _ in ranges if media in named_formats]
    wild = dict(ranges)
    others = wild.get("image/*", wild.get("*/*", 0.0))
    choices = [(liked.get(name, others), name) for name in dict.fromkeys((*order, *_WILD))]
    best_q = max(q for q, _ in choices)
    if best_q <= 0:
        raise NotAcceptable(f"there are {', '.join(MEDIA_TYPES.values())}", field="Accept")
    return next(name for q, name in choices if q == best_q)


def _range(part: str) -> tuple[str, float]:
    """A media range without regard to case, and its weight (RFC 9110, §12.5.1)."""
    media, *parameters = (piece.strip().lower() for piece in part.split(";"))
    q = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                q = min(1.0, max(0.0, float(value)))
            except ValueError:
                q = 0.0
    return media, q if math.isfinite(q) else 0.0


def _value(given: Mapping[str, str], name: str, kind: Callable[[Any], Value], default: Value) -> Value:
    try:
        return kind(given[name]) if name in given else default
    except ValueError as error:
        raise InvalidRequest(f"{given[name][:80]!r}: {error}", field=name) from None


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError("1 or 0")
    return text.lower() in ("1", "true")
