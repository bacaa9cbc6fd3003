"""Columns of a storage node: they are mapped once they are large, so that they grow without being copied."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_GROWS = """
import sys
from array import array
from quire_storage.allocator import map_large_blocks

if sys.argv[1] == "mapped":
    map_large_blocks()
freed = bytearray(24 << 20)  # mapped; when it is freed, glibc maps only larger blocks
del freed
column = array("q", bytes(8 << 20))
address, _ = column.buffer_info()
(heap,) = [line.split()[0] for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
start, stop = (int(bound, 16) for bound in heap.split("-"))
print(start <= address < stop)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries map large blocks")
@pytest.mark.parametrize("mapped", [True, False])
def test_a_large_column_is_mapped(mapped: bool) -> None:
    """The fault put back: without the call the column is in the heap."""
    command = [sys.executable, "-c", _GROWS, "mapped" if mapped else ""]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.strip() == str(not mapped)
