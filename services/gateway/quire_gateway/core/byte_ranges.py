"""The range of a request for a part of something (RFC 9110, §14)."""

from __future__ import annotations

import re
from typing import Final

_RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


class NothingInRange(ValueError):
    """The range contains no byte of the object."""


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """Return start and end (exclusive) within `size` bytes; None for all of them.

    All are meant without a range, and with one that is passed over, such as several at once. Raises `NothingInRange`.
    """
    matched = _RANGE.fullmatch(header.replace(" ", ""))
    if matched is None or not any(matched.groups()):
        return None
    first, last = matched.groups()
    if not first:
        start, end = max(0, size - int(last)), size
        empty = int(last) == 0 or size == 0
    else:
        if last and int(last) < int(first):
            return None
        start, end = int(first), min(size, int(last) + 1 if last else size)
        empty = start >= size
    if empty:
        raise NothingInRange
    return start, end
