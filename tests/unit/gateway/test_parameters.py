"""How a query and an Accept header become a rendering."""

from __future__ import annotations

import pytest

from quire.model.errors import ConfigInvalid, InvalidRequest
from quire.model.fitting import Fit, Gravity
from quire.model.images import Rendering
from quire_gateway.errors import NotAcceptable, ParameterUnknown
from quire_gateway.http.parameters import Parameters, accepted, named

CHROME = "image/avif,image/webp,image/apng,image/svg+xml,image/*,*/*;q=0.8"
SAFARI = "image/webp,image/avif,image/jxl,image/heic,video/*;q=0.8,image/png,image/svg+xml,image/*;q=0.8,*/*;q=0.5"
PAGE = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (CHROME, "avif"),
        (SAFARI, "webp"),
        (PAGE, "avif"),
        ("", "png"),
        ("*/*", "png"),
        ("image/*", "png"),
        ("IMAGE/WebP", "webp"),
        ("image/avif;q=0.5, image/webp;Q=0.9", "webp"),
        ("image/png;q=0, */*", "jpeg"),
        ("text/html, image/webp;q=0.8, image/avif;q=0.9, */*;q=0.1", "avif"),
        ("image/jpeg, image/png", "jpeg"),
        ("image/webp;q=nonsense, image/jpeg;q=0.1", "jpeg"),
    ],
)
def test_what_is_accepted(header: str, name: str) -> None:
    assert accepted(header) == name


@pytest.mark.parametrize("header", ["text/html", "image/tiff", "*/*;q=0", "image/avif;q=0"])
def test_what_cannot_be_had(header: str) -> None:
    with pytest.raises(NotAcceptable):
        accepted(header)


def test_a_browser_gets_what_looks_good_and_a_script_what_is_exact() -> None:
    """Unless it says a quality, or names the format: then it is as lossless as that is."""
    assert Parameters().read([], CHROME) == Rendering("avif", 70)
    assert Parameters().read([("quality", "50")], CHROME) == Rendering("avif", 50)
    assert Parameters().read([("format", "webp")], CHROME) == Rendering("webp", 0)
    assert Parameters().read([], "*/*") == Rendering("png", 0)


def test_parameters_and_their_short_names() -> None:
    long = [("format", "jpeg"), ("quality", "80"), ("width", "300"), ("height", "200"), ("fit", "cover")]
    expected = Rendering("jpeg", 80, 300, 200, Fit.COVER, Gravity.NORTH)
    assert Parameters().read([*long, ("gravity", "north")], "") == expected
    short = [("fm", "JPG"), ("q", "80"), ("w", "150"), ("h", "100"), ("dpr", "2"), ("fit", "cover")]
    assert Parameters().read([*short, ("gravity", "north")], "") == expected
    assert Parameters().read([("enlarge", "1")], "").enlarge


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ([("widht", "3")], ParameterUnknown),
        ([("w", "3"), ("width", "3")], InvalidRequest),
        ([("width", "wide")], InvalidRequest),
        ([("width", "-1")], InvalidRequest),
        ([("width", "9000")], InvalidRequest),
        ([("width", "8000"), ("dpr", "8")], InvalidRequest),
        ([("dpr", "nan")], InvalidRequest),
        ([("dpr", "0")], InvalidRequest),
        ([("fit", "stretch")], InvalidRequest),
        ([("gravity", "up")], InvalidRequest),
        ([("enlarge", "yes")], InvalidRequest),
        ([("format", "tiff")], InvalidRequest),
    ],
)
def test_what_is_refused(query: list[tuple[str, str]], error: type[Exception]) -> None:
    with pytest.raises(error):
        Parameters().read(query, "")


def test_a_refusal_says_what_there_is() -> None:
    with pytest.raises(ParameterUnknown, match="'a'; there are prefix, limit"):
        named([("a", "1")], ("prefix", "limit"))


PRESETS = "thumb=w=200&h=100&fit=cover&q=60; feed=width=1080 ;jpeg=format=jpeg&q=85;whole=fit=contain"


@pytest.mark.parametrize("free", [True, False])
def test_presets(free: bool) -> None:
    """With a format or what is accepted, and a density; nothing else beside one."""
    parameters = Parameters(PRESETS, free=free)
    assert parameters.read([("preset", "thumb")], CHROME) == Rendering("avif", 60, 200, 100, Fit.COVER)
    assert parameters.read([("preset", "thumb"), ("fm", "png"), ("dpr", "2")], "").width == 400
    assert parameters.read([("preset", "jpeg")], CHROME) == Rendering("jpeg", 85)
    assert parameters.read([("preset", "feed")], "") == Rendering("png", 0, 1080)
    for query in (
        [("preset", "none")],
        [("preset", "thumb"), ("width", "3")],
        [("preset", "thumb"), ("dpr", "1.5")],
        [("preset", "thumb"), ("preset", "feed")],
    ):
        with pytest.raises(InvalidRequest):
            parameters.read(query, "")


def test_without_free_forms_there_are_few() -> None:
    parameters = Parameters(PRESETS, free=False)
    assert parameters.read([("format", "webp")], "") == Rendering("webp")
    assert parameters.read([], CHROME) == Rendering("avif", 70)
    for name, value in (("width", "200"), ("q", "3"), ("fit", "cover"), ("enlarge", "1")):
        with pytest.raises(ParameterUnknown):
            parameters.read([(name, value)], "")
    with pytest.raises(InvalidRequest):
        parameters.read([("dpr", "1.25")], "")


@pytest.mark.parametrize(
    "presets", ["thumb", "thumb=", "thumb=w", "thumb=w=wide", "a=w=1;b=wdth=2", "c=dpr=2", "a=w=1;a=w=2"]
)
def test_presets_that_are_none_are_said_at_the_start(presets: str) -> None:
    with pytest.raises(ConfigInvalid, match="QUIRE_GATEWAY_IMAGES_PRESETS"):
        Parameters(presets)


def test_a_signed_query_has_free_forms() -> None:
    parameters, query = Parameters(PRESETS, free=False), [("w", "123"), ("format", "webp")]
    with pytest.raises(InvalidRequest):
        parameters.read(query, "")
    assert parameters.read(query, "", signed=True).width == 123
