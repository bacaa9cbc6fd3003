"""The pool on disk: what was committed comes back, what was torn does not, what is foreign is left alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quire.durability import Durability
from quire.metadata.index import ChunkRecord
from quire_storage.adapters.pool_file import PoolFile
from quire_storage.core.checksums import slice_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.core.slots import Shape, SlotAllocator
from quire_storage.errors import ForeignPool

_CAPACITY = 1 << 16
_SHAPE = Shape(3, 500)


def _store(folder: Path, arena: npt.NDArray[np.uint8], count: int) -> list[Chunk]:
    """Persist `count` chunks one by one, as separate commits; returns them."""
    allocator = SlotAllocator(_CAPACITY, 1 << 13)
    pool = PoolFile(folder, "node", _CAPACITY)
    assert pool.recover(np.zeros(_CAPACITY, dtype=np.uint8)) == []
    chunks = []
    for index, offset in enumerate(allocator.allocate(_SHAPE, count).tolist()):
        key = bytes([index]) * 32
        record = ChunkRecord(key, b"p" * 32, b"s" * 32, b"s" * 32)
        chunk = Chunk(record, 3, 500, offset, allocator.layer_stride(_SHAPE), np.zeros(3, dtype=np.uint32))
        chunk.durability = Durability.LOCAL
        chunk.checksums = slice_checksums(arena, chunk.slices(), 500)
        pool.persist([chunk], arena)
        chunks.append(chunk)
    pool.close()
    return chunks


def _recover(folder: Path) -> tuple[dict[bytes, Chunk], npt.NDArray[np.uint8]]:
    arena = np.zeros(_CAPACITY, dtype=np.uint8)
    pool = PoolFile(folder, "node", _CAPACITY)
    found = {chunk.record.key: chunk for chunk in pool.recover(arena)}
    pool.close()
    return found, arena


@pytest.fixture
def arena() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(2).integers(0, 256, _CAPACITY, dtype=np.uint8)


def test_committed_chunks_come_back_whole(tmp_path: Path, arena: npt.NDArray[np.uint8]) -> None:
    chunks = _store(tmp_path, arena, 7)
    for _ in range(2):  # recovery rewrites the log: it must survive that too
        found, restored = _recover(tmp_path)
        assert set(found) == {chunk.record.key for chunk in chunks}
        for chunk in chunks:
            assert found[chunk.record.key].record == chunk.record
            for at in chunk.slices().tolist():
                assert np.array_equal(restored[at : at + 500], arena[at : at + 500])


def test_any_torn_tail_costs_only_what_it_holds(tmp_path: Path, arena: npt.NDArray[np.uint8]) -> None:
    """The log cut at every byte: the commits before the cut come back, the rest does not, nothing raises."""
    chunks = _store(tmp_path, arena, 3)
    log = (tmp_path / "commit.log").read_bytes()
    seen = set()
    for cut in range(len(log) - 1, 20, -1):
        (tmp_path / "commit.log").write_bytes(log[:cut])
        found, _ = _recover(tmp_path)
        assert [chunk.record.key in found for chunk in chunks] == sorted(
            (chunk.record.key in found for chunk in chunks), reverse=True
        )
        seen.add(len(found))
        (tmp_path / "commit.log").write_bytes(log)
    assert seen == {0, 1, 2}


def test_flipped_payload_bit_makes_the_chunk_missing(tmp_path: Path, arena: npt.NDArray[np.uint8]) -> None:
    chunks = _store(tmp_path, arena, 3)
    with (tmp_path / "pool.dat").open("r+b") as file:
        at = int(chunks[1].slices()[2]) + 17
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    found, _ = _recover(tmp_path)
    assert set(found) == {chunks[0].record.key, chunks[2].record.key}


def test_a_failed_append_does_not_hide_later_commits(
    tmp_path: Path, arena: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full in the middle of a frame costs that commit alone; what is committed afterwards comes back."""
    chunks = _store(tmp_path, arena, 3)
    pool = PoolFile(tmp_path, "node", _CAPACITY)
    pool.recover(np.zeros(_CAPACITY, dtype=np.uint8))
    write = os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        write(file, bytes(data)[:10], offset)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space"):
        pool.forget([chunks[0].record.key])
    monkeypatch.undo()
    pool.forget([chunks[1].record.key])
    pool.close()
    assert set(_recover(tmp_path)[0]) == {chunks[0].record.key, chunks[2].record.key}


def test_forgotten_chunks_stay_forgotten(tmp_path: Path, arena: npt.NDArray[np.uint8]) -> None:
    chunks = _store(tmp_path, arena, 3)
    pool = PoolFile(tmp_path, "node", _CAPACITY)
    pool.recover(np.zeros(_CAPACITY, dtype=np.uint8))
    pool.forget([chunks[0].record.key])
    pool.close()
    assert set(_recover(tmp_path)[0]) == {chunks[1].record.key, chunks[2].record.key}


@pytest.mark.parametrize("change", ["node", "version", "magic"])
def test_foreign_pool_is_never_touched(tmp_path: Path, arena: npt.NDArray[np.uint8], change: str) -> None:
    _store(tmp_path, arena, 2)
    path = tmp_path / "commit.log"
    raw = bytearray(path.read_bytes())
    if change == "version":
        raw[8] = 99
    if change == "magic":
        raw[0] ^= 1
    path.write_bytes(raw)
    before = (path.read_bytes(), (tmp_path / "pool.dat").read_bytes())
    with pytest.raises(ForeignPool):
        PoolFile(tmp_path, "another" if change == "node" else "node", _CAPACITY)
    assert (path.read_bytes(), (tmp_path / "pool.dat").read_bytes()) == before
