"""What is read most, and how many of its chunks."""

from __future__ import annotations

import pytest

from quire.model.keys import ChunkKeys
from quire_storage.core import heat as module
from quire_storage.core.heat import Heat

KEYS = ChunkKeys(b"".join(number.to_bytes(32, "big") for number in range(64)))
OTHER = ChunkKeys(b"".join(number.to_bytes(32, "big") for number in range(100, 164)))


def _read_steadily(heat: Heat, keys: ChunkKeys, size: int, seconds: int, start_s: float = 0.0) -> float:
    """Ten reads a second; when the last one was."""
    for number in range(10 * seconds):
        heat.read(keys, size, start_s + number / 10)
    return start_s + seconds - 0.1


def test_a_steady_rate_is_found_and_forgotten() -> None:
    heat = Heat()
    now_s = _read_steadily(heat, KEYS, 1000, 40)
    assert heat.total(now_s) == pytest.approx(10_000, rel=0.05)
    assert heat.of(KEYS.at(0), now_s) == pytest.approx(10_000, rel=0.05)
    assert heat.of(KEYS.at(1), now_s) == 0
    (hot,) = heat.above(5000, now_s)
    assert hot.keys.packed == KEYS.packed and hot.bytes_per_s > 9000
    assert not heat.above(5000, now_s + 8)
    assert heat.total(now_s + 60) < 1


def test_the_fastest_come_first() -> None:
    heat = Heat()
    _read_steadily(heat, KEYS, 1000, 20)
    now_s = _read_steadily(heat, OTHER, 3000, 20)
    assert [each.keys.at(0) for each in heat.above(5000, now_s)] == [OTHER.at(0), KEYS.at(0)]


def test_what_readers_have_in_common_is_hot() -> None:
    """Conversations share ten chunks, and what lies behind these is each one's own."""
    heat = Heat()
    for number in range(100):
        own = ChunkKeys(KEYS.run(0, 10).packed + bytes([number + 1]) * 32 * 20)
        heat.read(own, 1000, number / 10)
    (hot,) = heat.above(5000, 10.0)
    assert 10 <= len(hot.keys) <= 11 and hot.keys.at(0) == KEYS.at(0)


def test_what_was_read_long_ago_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RANGES_MAX", 100)
    heat = Heat()
    for number in range(1000):
        heat.read(ChunkKeys(number.to_bytes(32, "big")), 10, float(number))
    assert len(heat._ranges) == 100
