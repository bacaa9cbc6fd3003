"""Rendering of an HTTP request: its query, and the formats that it accepts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

from quire.model.errors import ConfigInvalid, InvalidRequest
from quire.model.fitting import Fit, Gravity
from quire.model.images import MEDIA_TYPES, Rendering
from quire_gateway.errors import NotAcceptable, ParameterUnknown

_ALIASES: Final = {"f": "format", "fm": "format", "q": "quality", "w": "width", "h": "height"}
_OF_A_PRESET: Final = ("format", "quality", "width", "height", "fit", "gravity", "enlarge")
_BESIDE_A_PRESET: Final = ("preset", "format", "dpr")
OF_A_GET: Final = (*_OF_A_PRESET, "dpr", "preset")
_DENSITIES: Final = ("1", "2", "3")
_FORMATS: Final = {"jpg": "jpeg"}
_DPR_MAX: Final = 8.0
_NEGOTIATED: Final = {"avif": 70, "webp": 82, "jpeg": 85}
"""Quality of what a client accepts but did not name: good for the eye."""
_WILD: Final = ("png", "jpeg", "webp", "avif")
"""What is sent to a client that takes anything, best first."""
Value = TypeVar("Value")


class Parameters:
    """Parameters of an image in a query.

    `presets`: `NAME=QUERY;NAME=QUERY`, such as `thumb=w=200&h=200&fit=cover`. Unless `free`, a query names a preset or
    none, a format, and a dpr of 1, 2 or 3: so few forms that caches hold them. A signed query may say anything. Raises
    `ConfigInvalid`.
    """

    def __init__(self, presets: str = "", *, free: bool = True) -> None:
        self._free = free
        self._presets: dict[str, dict[str, str]] = {}
        for part in filter(None, (preset.strip() for preset in presets.split(";"))):
            name, _, query = part.partition("=")
            try:
                if not (name and query) or name in self._presets:
                    raise ValueError("each name once, with its meaning")
                self._presets[name] = named(parse_qsl(query, strict_parsing=True), _OF_A_PRESET, _ALIASES)
                _rendering(self._presets[name], "")
            except (InvalidRequest, ValueError) as error:
                raise ConfigInvalid(f"QUIRE_GATEWAY_IMAGES_PRESETS: {part!r}: {error}") from None

    def read(self, query: Iterable[tuple[str, str]], accept: str, *, signed: bool = False) -> Rendering:
        """Return the rendering; without `format` the best that is accepted.

        Raises `InvalidRequest`, `ParameterUnknown`, `NotAcceptable`.
        """
        pairs = list(query)
        preset = [value for name, value in pairs if name == "preset"]
        if not preset and (self._free or signed):
            return _rendering(named(pairs, OF_A_GET, _ALIASES), accept)
        parameters = named(pairs, _BESIDE_A_PRESET, _ALIASES)
        if preset and preset[0] not in self._presets:
            raise InvalidRequest(f"{preset[0][:80]!r}; there are {', '.join(self._presets) or 'none'}", field="preset")
        if parameters.get("dpr", "1") not in _DENSITIES:
            raise InvalidRequest(f"{parameters['dpr'][:80]!r}; there are {', '.join(_DENSITIES)}", field="dpr")
        return _rendering((self._presets[preset[0]] if preset else {}) | parameters, accept)

    def negotiates(self, query: Iterable[tuple[str, str]]) -> bool:
        """Whether `read` chooses the format by what the client accepts, since neither query nor preset names one."""
        parameters = {_ALIASES.get(name, name): value for name, value in query}
        return "format" not in self._presets.get(parameters.get("preset", ""), {}) | parameters


def _rendering(parameters: Mapping[str, str], accept: str) -> Rendering:
    dpr = _value(parameters, "dpr", float, 1.0)
    if not (math.isfinite(dpr) and 0 < dpr <= _DPR_MAX):
        raise InvalidRequest(f"{dpr} is not above 0 and up to {_DPR_MAX:g}", field="dpr")
    rendering = Rendering(
        quality=_value(parameters, "quality", int, 0),
        width=round(_value(parameters, "width", int, 0) * dpr),
        height=round(_value(parameters, "height", int, 0) * dpr),
        fit=_value(parameters, "fit", Fit, Fit.CONTAIN),
        gravity=_value(parameters, "gravity", Gravity, Gravity.CENTER),
        enlarge=_value(parameters, "enlarge", _flag, False),
    )
    if media_type := parameters.get("format", "").lower():
        return replace(rendering, format=_FORMATS.get(media_type, media_type))
    name = accepted(accept)
    quality = rendering.quality or (0 if name == "png" else _NEGOTIATED[name])
    return replace(rendering, format=name, quality=quality)


def without_version(query: Iterable[tuple[str, str]]) -> tuple[str, list[tuple[str, str]]]:
    """The version (`v`) that a URL names, "" for none, and the rest of its query. Raises `InvalidRequest`."""
    pairs = list(query)
    versions = [value for name, value in pairs if name == "v"]
    if len(versions) > 1 or "" in versions:
        raise InvalidRequest("once, with the version that its PUT answered", field="v")
    return (versions or [""])[0], [pair for pair in pairs if pair[0] != "v"]


def named(
    query: Iterable[tuple[str, str]], names: Sequence[str], aliases: Mapping[str, str] | None = None
) -> dict[str, str]:
    """A query by its parameters' names. Raises `ParameterUnknown`, and `InvalidRequest` for one that is given twice."""
    parameters: dict[str, str] = {}
    for written, value in query:
        name = (aliases or {}).get(written, written)
        if name not in names:
            raise ParameterUnknown(f"{written!r}; there are {', '.join(names)}", field=written[:80])
        if name in parameters:
            raise InvalidRequest("is given twice", field=name)
        parameters[name] = value
    return parameters


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
    fallback = wild.get("image/*", wild.get("*/*", 0.0))
    choices = [(liked.get(name, fallback), name) for name in dict.fromkeys((*order, *_WILD))]
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


def _value(parameters: Mapping[str, str], name: str, kind: Callable[[Any], Value], default: Value) -> Value:
    try:
        return kind(parameters[name]) if name in parameters else default
    except ValueError as error:
        raise InvalidRequest(f"{parameters[name][:80]!r}: {error}", field=name) from None


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError("1 or 0")
    return text.lower() in ("1", "true")
