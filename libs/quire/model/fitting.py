"""Fitting of an image to a box."""

from __future__ import annotations

from enum import Enum


class Fit(Enum):
    """Fitting of an image to a box: the whole image within it, or the box filled by a part of the image."""

    CONTAIN = "contain"
    COVER = "cover"


class Gravity(Enum):
    """The part of an image that remains when it is cropped."""

    CENTER = "center"
    NORTH = "north"
    SOUTH = "south"
    WEST = "west"
    EAST = "east"
