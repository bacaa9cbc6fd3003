"""The C library's allocator: large blocks are mapped, so that columns of millions of rows grow without being copied."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_MAPPED_BYTES: Final = 4 << 20


def map_large_blocks() -> None:
    """Map blocks of 4 MiB and more, always.

    When glibc frees a mapped block, it maps only larger blocks from then on, up to 32 MiB. Smaller columns are in the
    heap, and are copied each time that they grow. Other C libraries map large blocks.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
