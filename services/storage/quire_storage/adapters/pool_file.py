"""The pool on disk: one preallocated file with the arena's geometry, and a commit log beside it.

`pool.dat` holds each slice at the offset that it has in the arena. `commit.log` says which of them count: a header
(magic, version, node), then frames of (length, CRC-32, CBOR). Bytes are written and synced before their commit frame
is, so a chunk that has a frame has its bytes; a torn frame at the end is cut off. Recovery verifies every slice all
the same.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import cbor2
import numpy as np
import numpy.typing as npt

from quire.durability import Durability
from quire.metadata.index import ChunkRecord
from quire_storage.core.checksums import mismatches
from quire_storage.core.chunks import Chunk
from quire_storage.core.extents import extents
from quire_storage.errors import ForeignPool

Bytes = npt.NDArray[np.uint8]
_MAGIC: Final = b"QUIRELOG"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sII")  # magic, version, length of the node's name
_FRAME: Final = struct.Struct("<II")
_COMMIT, _FORGET = 1, 2
_FRAME_BYTES_MAX: Final = 1 << 20
_WRITE_BYTES_MAX: Final = 16 << 20


class PoolFile:
    """The `DurablePool` port on two plain files of `folder`. Raises `ForeignPool` rather than touch another's pool."""

    def __init__(self, folder: Path, node_id: str, capacity_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log_path = folder / "commit.log"
        self._node_id = node_id
        self._frames = list(self._read_log())
        self._data = os.open(folder / "pool.dat", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.fstat(self._data).st_size < capacity_bytes:
            os.posix_fallocate(self._data, 0, capacity_bytes)
        self._log = -1
        self._log_end = 0

    def recover(self, arena: Bytes) -> list[Chunk]:
        alive: dict[bytes, Chunk] = {}
        for frame in self._frames:
            if frame[0] == _COMMIT:
                chunk = _chunk_of(frame)
                alive[chunk.record.key] = chunk
            else:
                alive.pop(frame[1], None)
        self._frames.clear()
        sound = [chunk for chunk in alive.values() if self._read(chunk, arena)]
        self._rewrite_log(sound)
        return sound

    def persist(self, chunks: Sequence[Chunk], arena: Bytes) -> None:
        for group in _by_shape(chunks):
            size = group[0].slice_bytes
            bases = np.array([chunk.offset for chunk in group], dtype=np.int64)
            for layer in range(group[0].num_layers):
                shift = layer * group[0].layer_stride
                for part in extents(bases, size, _WRITE_BYTES_MAX):
                    start = part.offset + shift
                    self._write_all(self._data, arena[start : start + part.count * size], start)
        os.fdatasync(self._data)
        self._append([_frame_of(chunk) for chunk in chunks])

    def forget(self, keys: Sequence[bytes]) -> None:
        self._append([[_FORGET, key] for key in keys])

    def close(self) -> None:
        os.close(self._data)
        if self._log >= 0:
            os.close(self._log)

    def _read(self, chunk: Chunk, arena: Bytes) -> bool:
        slices = chunk.slices()
        if int(slices[-1]) + chunk.slice_bytes > arena.nbytes:
            return False
        for start in slices.tolist():
            target = arena[start : start + chunk.slice_bytes]
            if os.preadv(self._data, [target.data], start) != chunk.slice_bytes:
                return False
        return not mismatches(arena, slices, chunk.slice_bytes, chunk.checksums)

    def _write_all(self, file: int, data: Any, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(file, view, offset)
            view, offset = view[written:], offset + written

    def _append(self, frames: Sequence[list[Any]]) -> None:
        assert self._log >= 0, "recover() comes first"
        data = b"".join(map(_encode, frames))
        try:
            self._write_all(self._log, data, self._log_end)
            os.fdatasync(self._log)
        except OSError:
            # A torn frame would hide every later one from recovery: cut it off, or write over it next time.
            os.ftruncate(self._log, self._log_end)
            raise
        self._log_end += len(data)

    def _read_log(self) -> Iterator[list[Any]]:
        if not self._log_path.exists():
            return
        raw = self._log_path.read_bytes()
        at = self._check_header(raw)
        while at + _FRAME.size <= len(raw):
            length, crc = _FRAME.unpack_from(raw, at)
            body = raw[at + _FRAME.size : at + _FRAME.size + length]
            if not 0 < length <= _FRAME_BYTES_MAX or len(body) < length or zlib.crc32(body) != crc:
                return  # torn by a crash: nothing after it was acknowledged
            yield cbor2.loads(body)
            at += _FRAME.size + length

    def _check_header(self, raw: bytes) -> int:
        if len(raw) < _HEADER.size or raw[:8] != _MAGIC:
            raise ForeignPool(f"{self._log_path} is no commit log of Quire; it is left as it is")
        _, version, name_size = _HEADER.unpack_from(raw)
        name = raw[_HEADER.size : _HEADER.size + name_size].decode(errors="replace")
        if version != _VERSION:
            raise ForeignPool(f"{self._log_path} has version {version}, this is {_VERSION}; it is left as it is")
        if name != self._node_id:
            raise ForeignPool(f"{self._log_path} belongs to node {name!r}, this is {self._node_id!r}")
        return _HEADER.size + int(name_size)

    def _rewrite_log(self, chunks: Sequence[Chunk]) -> None:
        """Start the log anew with what is alive, in a file of its own that replaces the old one whole."""
        name = self._node_id.encode()
        fresh = self._log_path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, len(name)) + name)
            for chunk in chunks:
                file.write(_encode(_frame_of(chunk)))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._log_path)
        folder = os.open(self._log_path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        self._log = os.open(self._log_path, os.O_RDWR | os.O_CLOEXEC)
        self._log_end = os.fstat(self._log).st_size


def _by_shape(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks gathered by shape, so that neighbours are written together."""
    groups: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault((chunk.num_layers, chunk.slice_bytes), []).append(chunk)
    return list(groups.values())


def _encode(frame: list[Any]) -> bytes:
    body = cbor2.dumps(frame)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def _frame_of(chunk: Chunk) -> list[Any]:
    record = chunk.record
    return [
        _COMMIT,
        record.key,
        record.parent,
        record.segment,
        record.parent_segment,
        chunk.num_layers,
        chunk.slice_bytes,
        chunk.offset,
        chunk.layer_stride,
        chunk.checksums.astype("<u4").tobytes(),
    ]


def _chunk_of(frame: list[Any]) -> Chunk:
    _, key, parent, segment, parent_segment, layers, slice_bytes, offset, layer_stride, checksums = frame
    record = ChunkRecord(key, parent, segment, parent_segment)
    return Chunk(
        record,
        layers,
        slice_bytes,
        offset,
        layer_stride,
        np.frombuffer(checksums, "<u4").astype(np.uint32),
        Durability.LOCAL,
    )
