"""Checks of delivered bytes against the contents that clients have sent."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.model.layout import KvLayout
from tests.simulation.history import History
from tests.simulation.prefixes import Prefix, content

UNUSED: Final = 0xEE
"""Every byte of a buffer before a transfer."""


def check_layer(history: History, layer: int, rows: npt.NDArray[np.uint8], prefix: Prefix, first: int) -> None:
    """Check an announced layer.

    Args:
        rows: (chunks, slice bytes), of the chunks of the prefix from `first` on.
    """
    for index, row in enumerate(rows):
        key = prefix.keys.at(first + index)
        versions = history.written.get(key, ())
        if any(np.array_equal(row, content(key, version, prefix.layout)[layer]) for version in versions):
            continue
        if (row == UNUSED).all():
            raise history.fail(f"layer {layer} was announced, and is not there", key)
        raise history.fail("wrong bytes were delivered", key)


def check_chunk(history: History, key: bytes, rows: npt.NDArray[np.uint8], layout: KvLayout) -> int:
    """Check a delivered chunk, (layers, slice bytes); which of its versions it is."""
    for version in history.written.get(key, ()):
        if np.array_equal(rows, content(key, version, layout)):
            return version
    raise history.fail("wrong bytes were delivered", key)


def marked(summary: Any) -> int:
    """Return how many chunks of a transfer arrived, or are kept."""
    return sum(sum(outcome.delivered) for outcome in summary.outcomes)


def marks_of(outcome: Any) -> list[tuple[Any, bytes]]:
    """Ranges of an outcome with their part of its marks."""
    ends = accumulate(run.count for run in outcome.ranges)
    return [(run, outcome.delivered[end - run.count : end]) for run, end in zip(outcome.ranges, ends, strict=True)]
