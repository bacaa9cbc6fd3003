"""Memory that payloads pass through."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from quire.transport.pages import anonymous_memory

HUGE_PAGE = 2 << 20


def _flags(address: int) -> list[str]:
    """Linux's flags of the mapping that has this address (proc(5), smaps)."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, stop = (int(end, 16) for end in mapping.split(" ", 1)[0].split("-"))
        match = re.search(r"^VmFlags:(.*)$", mapping, re.MULTILINE)
        if start <= address < stop and match is not None:
            return match.group(1).split()
    raise LookupError(hex(address))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_the_kernel_may_put_it_on_huge_pages() -> None:
    """Not so shared memory, which Python maps by default: `sh`."""
    view = np.frombuffer(anonymous_memory(HUGE_PAGE), dtype=np.uint8)
    assert {"hg", "sh"} & set(_flags(int(view.ctypes.data))) == {"hg"}


def test_it_is_zeroed_and_aligned_to_a_page() -> None:
    for length in (1, 4095, 3 * HUGE_PAGE + 1):
        view = np.frombuffer(anonymous_memory(length), dtype=np.uint8)
        assert len(view) == length and not view.any() and view.ctypes.data % os.sysconf("SC_PAGE_SIZE") == 0
