"""Ids of images; boxes, crops, and what has the same ETag."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.errors import InvalidRequest
from quire.model.fitting import Fit, Gravity
from quire.model.images import Geometry, ImageEntry, Rendering, check_image_id

_SIZE = st.integers(1, 3000)
_BOX = st.integers(0, 3000)


def _entry(height: int, width: int) -> ImageEntry:
    return ImageEntry("i", bytes(32), 100, bytes(32), "", height, width)


@pytest.mark.parametrize(
    ("rendering", "geometry"),
    [
        (Rendering(), Geometry(200, 400, 0, 0, 200, 400)),
        (Rendering(width=100), Geometry(50, 100, 0, 0, 50, 100)),
        (Rendering(height=100), Geometry(100, 200, 0, 0, 100, 200)),
        (Rendering(width=100, height=100), Geometry(50, 100, 0, 0, 50, 100)),
        (Rendering(width=100, height=100, fit=Fit.COVER), Geometry(100, 200, 0, 50, 100, 100)),
        (Rendering(width=100, height=100, fit=Fit.COVER, gravity=Gravity.WEST), Geometry(100, 200, 0, 0, 100, 100)),
        (Rendering(width=100, height=100, fit=Fit.COVER, gravity=Gravity.EAST), Geometry(100, 200, 0, 100, 100, 100)),
        (Rendering(width=200, height=50, fit=Fit.COVER, gravity=Gravity.SOUTH), Geometry(100, 200, 50, 0, 50, 200)),
        (Rendering(width=100, fit=Fit.COVER), Geometry(50, 100, 0, 0, 50, 100)),
        (Rendering(width=800), Geometry(200, 400, 0, 0, 200, 400)),
        (Rendering(width=800, enlarge=True), Geometry(400, 800, 0, 0, 400, 800)),
        (Rendering(width=800, height=800, fit=Fit.COVER), Geometry(200, 400, 0, 100, 200, 200)),
        (Rendering(width=800, height=800, fit=Fit.COVER, enlarge=True), Geometry(800, 1600, 0, 400, 800, 800)),
    ],
)
def test_of_an_image_of_200_by_400(rendering: Rendering, geometry: Geometry) -> None:
    """A box that is larger than the image gets smaller in its own shape, unless enlarging is asked for."""
    assert rendering.geometry(200, 400) == geometry


@given(_SIZE, _SIZE, _BOX, _BOX, st.sampled_from(Fit), st.sampled_from(Gravity))
def test_what_is_kept_is_within_and_no_larger_than_asked(
    height: int, width: int, box_height: int, box_width: int, fit: Fit, gravity: Gravity
) -> None:
    shape = Rendering(width=box_width, height=box_height, fit=fit, gravity=gravity).geometry(height, width)
    assert shape.height >= 1 <= shape.width
    assert 0 <= shape.top <= shape.scaled_height - shape.height
    assert 0 <= shape.left <= shape.scaled_width - shape.width
    assert shape.scaled_height <= height
    assert shape.scaled_width <= width
    assert shape.height <= (box_height or height)
    assert shape.width <= (box_width or width)


def test_the_same_bytes_have_one_etag() -> None:
    entry = _entry(200, 400)
    same = [
        [Rendering(), Rendering(width=400), Rendering(width=4000), Rendering(quality=50), Rendering(height=200)],
        [Rendering("jpeg"), Rendering("jpeg", 90)],
        [Rendering("webp", 80, 100), Rendering("webp", 80, 100, 50), Rendering("webp", 80, 100, 100)],
        [Rendering("webp"), Rendering("webp", width=400)],
        [Rendering("webp", 90)],
    ]
    tags = [{each.etag(entry, "build") for each in several} for several in same]
    assert all(len(each) == 1 for each in tags)
    assert len(set[str]().union(*tags)) == len(same)
    assert Rendering(width=400).is_original(entry)
    assert not Rendering("webp").is_original(entry)


def test_what_is_made_on_the_way_counts() -> None:
    """A thin box full of an image that is enlarged to be cropped."""
    thin = Rendering(width=8192, height=1, fit=Fit.COVER, enlarge=True)
    with pytest.raises(InvalidRequest, match="pixels"):
        thin.size(_entry(4000, 400))
    assert thin.geometry(4000, 400).height == 1


@pytest.mark.parametrize(
    "image_id",
    ["cat", "cats/tom.1", "\u732b/\U0001f431", "a b", "-", "~", "a" * 512, "caf\u00e9", "100%", "a?b=c", "..."],
)
def test_ids(image_id: str) -> None:
    check_image_id(image_id)


@pytest.mark.parametrize(
    "image_id",
    [
        "",
        "/",
        "a//b",
        "/a",
        "a/",
        ".",
        "a/../b",
        "a/./b",
        "a\0b",
        "a\nb",
        "a" * 513,
        "\u732b" * 171,
        "cafe\u0301",
        "\ud800",
    ],
)
def test_what_is_no_id(image_id: str) -> None:
    with pytest.raises(InvalidRequest):
        check_image_id(image_id)
