"""Memory that payloads pass through, on huge pages where the kernel has some."""

from __future__ import annotations

import mmap
from typing import Final

_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def anonymous_memory(length: int) -> mmap.mmap:
    """Map `length` zeroed bytes, aligned to a page, which cost nothing until they are touched.

    Private: shared anonymous memory stays on small pages where `shmem_enabled` is off, as it is by default. Children of
    this process do not have it: the kernel would copy a page at the next write, and a device keep the old one.
    """
    memory = mmap.mmap(-1, length, _PRIVATE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory
