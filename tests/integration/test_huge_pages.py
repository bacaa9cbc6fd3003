"""The arena on huge pages that were set apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.model.errors import ConfigInvalid
from quire_storage.tiers.arena import Arena

FREE = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("HugePages_Free"))
PAGES = int(FREE.split()[1])


@pytest.mark.skipif(PAGES < 8, reason="no huge pages were set apart (sysctl vm.nr_hugepages=64)")
def test_the_arena_takes_huge_pages() -> None:
    arena = Arena(8 << 20, 1 << 20, 1 << 20, 1 << 19)
    arena.map(reserved=True)
    arena.view[:] = 7
    assert arena.view.sum() == 7 * len(arena.view)


def test_pages_that_are_not_there_are_a_clear_error() -> None:
    arena = Arena(1 << 50, 1 << 40, 1 << 20, 1 << 19)
    with pytest.raises(ConfigInvalid, match="QUIRE_STORAGE_HUGE_PAGES"):
        arena.map(reserved=True)
