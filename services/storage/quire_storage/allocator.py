"""The C library's allocator: large blocks are mapped, so that columns of millions of rows grow without being copied."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_MAPPED_BYTES: Final = 4 << 20


def map_large_blocks() -> None:
    """Have blocks of 4 MiB and more mapped, always.

    glibc raises that threshold, up to 32 MiB, when a mapped block is freed. A column below it lies in the heap, and is
    copied each time that it grows: 60 ms for the columns of two million chunks. Other C libraries map large blocks.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
