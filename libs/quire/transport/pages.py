"""Memory that payloads pass through, on huge pages where the kernel has some."""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def anonymous_memory(length: int) -> mmap.mmap:
    """Map `length` zeroed bytes, aligned to a page, which cost nothing until they are touched.

    Private: the kernel keeps shared anonymous memory on small pages unless `shmem_enabled` says otherwise, which it
    does not by default.
    """
    memory = mmap.mmap(-1, length, _PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
