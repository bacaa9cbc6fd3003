"""The pool on disk, version 2: one preallocated file per drive, each complete in itself.

    offset          what
    0, 4096         superblock, twice: written in turns, the sound one with the higher generation counts
    65536           header pages, 4 KiB each, all headers of the file in this one region
    data_offset     slabs (see `slots`), 1 MiB-aligned

A slot is in use if a sound header says so. A header is 192 bytes and a CRC-32 per layer, padded to a multiple of 512,
so that no two headers share a sector; a page holds headers of one slab. All integers are little-endian.

Order of writes: the chunk's bytes, sync, its header, sync, acknowledged. To free a slot: its header zeroed, sync, then
the slot may be taken again. So at any instant a sound header stands for a whole chunk, and a torn header is no header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from quire.model.chunk_object import CRC_FROM, HAS_PARENT, HEADER, HEADER_MAGIC, record_of
from quire.model.durability import Durability
from quire.model.errors import LayoutInvalid
from quire_storage.core.chunks import Chunk, Header
from quire_storage.errors import ForeignPool

Bytes = npt.NDArray[np.uint8]
VERSION: Final = 2
PAGE_BYTES: Final = 4096
UNIT_BYTES: Final = 512
HEADERS_OFFSET: Final = 64 << 10
DATA_ALIGNMENT: Final = 1 << 20
_MAGIC: Final = b"QUIREPOL"
IN_OBJECT: Final = 2
LEVELS: Final = tuple(Durability)

_SUPERBLOCK: Final = np.dtype(
    [
        ("magic", "S8"),
        ("crc", "<u4"),
        ("version", "<u4"),
        ("generation", "<u8"),
        ("node_id", "S64"),
        ("slab_bytes", "<u8"),
        ("slab_count", "<u8"),
        ("header_pages", "<u8"),
        ("header_pages_used", "<u8"),
        ("data_offset", "<u8"),
        ("reserved", "V64"),
    ]
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a drive's file is divided; fixed when it is created."""

    slab_bytes: int
    slab_count: int
    header_pages: int

    @property
    def data_offset(self) -> int:
        end = HEADERS_OFFSET + self.header_pages * PAGE_BYTES
        return -(-end // DATA_ALIGNMENT) * DATA_ALIGNMENT

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.slab_count * self.slab_bytes

    @staticmethod
    def within(file_bytes: int, slab_bytes: int, chunk_bytes_min: int) -> Geometry:
        """As many slabs as fit, with headers for chunks of `chunk_bytes_min` on the average."""
        headers = max(PAGE_BYTES, file_bytes // chunk_bytes_min * UNIT_BYTES)
        pages = -(-headers // PAGE_BYTES)
        overhead = Geometry(slab_bytes, 0, pages).data_offset
        return Geometry(slab_bytes, max(0, file_bytes - overhead) // slab_bytes, pages)


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a drive's file says of itself. `header_pages_used`: pages from here on were never written."""

    node_id: str
    geometry: Geometry
    generation: int
    header_pages_used: int


def pack_superblock(block: Superblock) -> bytes:
    """4,096 bytes."""
    row = np.zeros(1, dtype=_SUPERBLOCK)
    row["magic"], row["version"], row["generation"] = _MAGIC, VERSION, block.generation
    row["node_id"] = block.node_id.encode()
    row["slab_bytes"], row["slab_count"] = block.geometry.slab_bytes, block.geometry.slab_count
    row["header_pages"], row["header_pages_used"] = block.geometry.header_pages, block.header_pages_used
    row["data_offset"] = block.geometry.data_offset
    raw = bytearray(row.tobytes().ljust(PAGE_BYTES, b"\0"))
    raw[8:12] = crc32(bytes(raw[12:])).to_bytes(4, "little")
    return bytes(raw)


def read_superblock(raw: bytes, node_id: str, name: str) -> Superblock:
    """The newer sound one of the two in the file's first 8,192 bytes.

    Raises `ForeignPool` for a file that is not a pool, of another version or of another node. `name` is for messages.
    """
    sound = [block for at in (0, PAGE_BYTES) if (block := _superblock(raw[at : at + PAGE_BYTES], name)) is not None]
    if not sound:
        raise ForeignPool(f"{name} is no pool of Quire, or both its superblocks are damaged; it is left as it is")
    best = max(sound, key=lambda block: block.generation)
    if best.node_id != node_id:
        raise ForeignPool(f"{name} belongs to node {best.node_id!r}, this is {node_id!r}; it is left as it is")
    return best


def _superblock(raw: bytes, name: str) -> Superblock | None:
    if len(raw) < PAGE_BYTES or raw[:8] != _MAGIC or int.from_bytes(raw[8:12], "little") != crc32(raw[12:]):
        return None
    row = np.frombuffer(raw, dtype=_SUPERBLOCK, count=1)[0]
    if row["version"] != VERSION:
        raise ForeignPool(f"{name} has version {row['version']}, this is {VERSION}; it is left as it is")
    geometry = Geometry(int(row["slab_bytes"]), int(row["slab_count"]), int(row["header_pages"]))
    if geometry.data_offset != row["data_offset"]:
        raise ForeignPool(f"{name} has its slabs at {row['data_offset']}, {geometry.data_offset} was expected")
    return Superblock(row["node_id"].decode(), geometry, int(row["generation"]), int(row["header_pages_used"]))


def place_of(field: str) -> int:
    """Where a header has one of its fields."""
    assert HEADER.fields is not None, "it has named fields"
    return int(HEADER.fields[field][1])


def header_bytes(num_layers: int) -> int:
    """Room that the header of a chunk takes up. Raises `LayoutInvalid` for one that does not fit a page."""
    size = -(-(HEADER.itemsize + 4 * num_layers) // UNIT_BYTES) * UNIT_BYTES
    if size > PAGE_BYTES:
        raise LayoutInvalid(f"{num_layers}; the pool's headers hold {(PAGE_BYTES - 192) // 4}", field="num_layers")
    return size


def pack_header(header: Header, slab: int = 0, slot: int = 0, generation: int = 0) -> bytes:
    """`header_bytes(num_layers)` bytes."""
    chunk = header.chunk
    row, record = np.zeros(1, dtype=HEADER), chunk.record
    row["magic"], row["generation"], row["slab"], row["slot"] = HEADER_MAGIC, generation, slab, slot
    row["num_layers"], row["slice_bytes"] = chunk.num_layers, chunk.slice_bytes
    row["flags"] = (HAS_PARENT if record.parent else 0) | (IN_OBJECT if header.in_object else 0)
    row["durability"] = LEVELS.index(header.level)
    row["stored_ms"] = chunk.stored_ms
    fields = record.key + (record.parent or bytes(32)) + record.bucket + (record.parent_bucket or bytes(32))
    body = bytearray(row.tobytes())
    body[48 : 48 + 128], body[176:192] = fields, chunk.namespace
    body += chunk.checksums.astype("<u4").tobytes()
    body[4:8] = crc32(bytes(body[CRC_FROM:])).to_bytes(4, "little")
    return bytes(body.ljust(header_bytes(chunk.num_layers), b"\0"))


@dataclass(frozen=True, slots=True)
class FoundHeaders:
    """Sound headers of a region: where each starts in it, and its fixed fields."""

    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.void]


def find_headers(region: Bytes) -> FoundHeaders:
    """All sound headers of a region of whole pages."""
    units = region.reshape(-1, UNIT_BYTES)
    candidates = np.flatnonzero(units[:, :4].copy().view("<u4")[:, 0] == HEADER_MAGIC)
    offsets = candidates * UNIT_BYTES
    rows = rows_at(region, offsets)
    ends = offsets + HEADER.itemsize + 4 * rows["num_layers"].astype(np.int64)
    fits = ends <= (offsets // PAGE_BYTES + 1) * PAGE_BYTES
    view = memoryview(region.data)
    starts, stops, expected = offsets.tolist(), ends.tolist(), rows["crc"].tolist()
    sound = [
        fit and crc32(view[start + CRC_FROM : stop]) == crc
        for fit, start, stop, crc in zip(fits.tolist(), starts, stops, expected, strict=True)
    ]
    keep = np.array(sound, dtype=bool)
    return FoundHeaders(offsets[keep], rows[keep])


def rows_at(region: Bytes, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """The fixed fields of the headers that start at `offsets` of a region."""
    rows = region.reshape(-1, UNIT_BYTES)[offsets // UNIT_BYTES, : HEADER.itemsize]
    return np.ascontiguousarray(rows).view(HEADER)[:, 0]


def chunk_fields(raw: Bytes) -> tuple[np.void, npt.NDArray[np.uint32]]:
    """The fixed fields of the header that `raw` starts with, and its checksums."""
    row = raw[: HEADER.itemsize].view(HEADER)[0]
    count = int(row["num_layers"])
    sums = raw[HEADER.itemsize : HEADER.itemsize + 4 * count].view("<u4").astype(np.uint32)
    return row, sums


def unpack_header(raw: Bytes) -> Header:
    """What the sound header at the start of `raw` says."""
    row, checksums = chunk_fields(raw)
    chunk = Chunk(
        record_of(row),
        int(row["num_layers"]),
        int(row["slice_bytes"]),
        checksums,
        row["namespace"].tobytes(),
        int(row["stored_ms"]),
    )
    return Header(chunk, LEVELS[int(row["durability"])], bool(int(row["flags"]) & IN_OBJECT))


def joined(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Runs (first, count) of consecutive pages, so that they are written in one piece."""
    runs: list[tuple[int, int]] = []
    for page in sorted(set(pages)):
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
