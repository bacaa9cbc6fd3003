"""The pool on disk, format 3: one preallocated file per drive, each complete in itself.

    offset          what
    0, 4096         superblock, twice: both are written each time, the sound one with the higher generation counts
    65536           header pages, 4 KiB each, all headers of the file in this one region
    data_offset     slabs (see `slots`), 1 MiB-aligned

A slot is in use if a sound header says so. A header is 192 bytes and a CRC-32 per layer, padded to a multiple of 512,
so that no two headers share a sector; a page holds headers of one slab. All integers are little-endian.

A header's first unit of 512 bytes begins with the type of headers in this pool, and its CRC starts from a value of this
pool: both come from a random salt in the superblock. Headers are walked by stride: the units behind a header's first
one hold checksums of slices, which a tenant can choose freely, and are never looked at as headers. Where a first unit
was lost to a torn write, what follows would have to guess the 64 bits of the salt.

A header carries two numbers that grow: the generation of its place, in the order in which places were allocated, and
the revision, which counts how often the header was written there. It also carries the generation of the index entry
under which the node listed the chunk last: a deletion names that generation, and removes no other copy.

Order of writes: the chunk's bytes, sync, its header, sync, acknowledged. To free a slot: its header zeroed, sync, then
the slot may be taken again. So at any instant a sound header stands for a whole chunk, and a torn header is no header.
A header that is written again changes in its first unit only, which a sector holds: either version survives.

Format 2 had no salt, one superblock a change, and no index generation. `upgrade` turns its headers into those of format
3 in place: only first units change. Meanwhile the superblock says that both kinds may be there.
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
from quire_storage.core.pool.slots import ALIGNMENT
from quire_storage.errors import ForeignPool

Bytes = npt.NDArray[np.uint8]
VERSION: Final = 3
OLDEST_VERSION: Final = 2
PAGE_BYTES: Final = 4096
UNIT_BYTES: Final = 512
HEADERS_OFFSET: Final = 64 << 10
DATA_ALIGNMENT: Final = 1 << 20
_MAGIC: Final = b"QUIREPOL"
IN_OBJECT: Final = 2
LEVELS: Final = tuple(Durability)
_LEVEL_NUMBERS: Final = {level: number for number, level in enumerate(LEVELS)}
_ABSENT: Final = bytes(32)

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
        ("salt", "<u8"),
        ("place_generations", "<u8"),
        ("upgrading", "<u4"),
        ("reserved", "V44"),
    ]
)
POOL_HEADER: Final = np.dtype(
    [
        ("type", "<u4"),
        ("crc", "<u4"),
        ("generation", "<u8"),
        ("slab", "<u4"),
        ("slot", "<u4"),
        ("num_layers", "<u2"),
        ("flags", "u1"),
        ("durability", "u1"),
        ("slice_bytes", "<u4"),
        ("revision", "<u2"),
        ("stored_ms_high", "<u2"),
        ("stored_ms_low", "<u4"),
        ("index_generation", "<u8"),
        ("key", "V32"),
        ("parent", "V32"),
        ("bucket", "V32"),
        ("parent_bucket", "V32"),
        ("namespace", "V16"),
    ]
)
assert POOL_HEADER.itemsize == HEADER.itemsize, "the checksums start behind it"
_KEY_AT: Final = 48  # in headers of both kinds
_TYPE: Final = 0x33435751  # "QWC3", before the salt


@dataclass(frozen=True, slots=True)
class DriveGeometry:
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
    def within(file_bytes: int, slab_bytes: int, chunk_bytes_min: int) -> DriveGeometry:
        """Return the geometry with as many slabs as fit, for chunks of `chunk_bytes_min` on average."""
        headers = max(PAGE_BYTES, file_bytes // chunk_bytes_min * UNIT_BYTES)
        pages = -(-headers // PAGE_BYTES)
        overhead = DriveGeometry(slab_bytes, 0, pages).data_offset
        return DriveGeometry(slab_bytes, max(0, file_bytes - overhead) // slab_bytes, pages)


@dataclass(frozen=True, slots=True)
class Superblock:
    """Superblock of a drive's file.

    `header_pages_used`: pages from here on were never written. `place_generations`: no header has a greater generation.
    `upgrading`: headers of format 2 may be there.
    """

    node_id: str
    geometry: DriveGeometry
    generation: int
    header_pages_used: int
    salt: int = 0
    place_generations: int = 0
    upgrading: bool = False


def pack_superblock(block: Superblock) -> bytes:
    """4,096 bytes."""
    row = np.zeros(1, dtype=_SUPERBLOCK)
    row["magic"], row["version"], row["generation"] = _MAGIC, VERSION, block.generation
    row["node_id"] = block.node_id.encode()
    row["slab_bytes"], row["slab_count"] = block.geometry.slab_bytes, block.geometry.slab_count
    row["header_pages"], row["header_pages_used"] = block.geometry.header_pages, block.header_pages_used
    row["data_offset"] = block.geometry.data_offset
    row["salt"], row["place_generations"], row["upgrading"] = block.salt, block.place_generations, block.upgrading
    raw = bytearray(row.tobytes().ljust(PAGE_BYTES, b"\0"))
    raw[8:12] = crc32(bytes(raw[12:])).to_bytes(4, "little")
    return bytes(raw)


def read_superblock(raw: bytes, node_id: str, name: str) -> Superblock:
    """The newer sound one of the two in the file's first 8,192 bytes.

    Raises `ForeignPool` for a file that is not a pool, of another version or of another node. `name` is for messages.
    """
    sound = [block for at in (0, PAGE_BYTES) if (block := _superblock(raw[at : at + PAGE_BYTES], name)) is not None]
    if not sound:
        raise ForeignPool(f"{name} is no pool of Quire, or both its superblocks are damaged; it is left unchanged")
    best = max(sound, key=lambda block: block.generation)
    if best.node_id != node_id:
        raise ForeignPool(f"{name} belongs to node {best.node_id!r}, this is {node_id!r}; it is left unchanged")
    return best


def newest_slot(raw: bytes, name: str) -> int:
    """Return the slot, 0 or 1, of the superblock that `read_superblock` returns."""
    blocks = [_superblock(raw[at : at + PAGE_BYTES], name) for at in (0, PAGE_BYTES)]
    return max((0, 1), key=lambda slot: block.generation if (block := blocks[slot]) is not None else -1)


def _superblock(raw: bytes, name: str) -> Superblock | None:
    if len(raw) < PAGE_BYTES or raw[:8] != _MAGIC or int.from_bytes(raw[8:12], "little") != crc32(raw[12:]):
        return None
    row = np.frombuffer(raw, dtype=_SUPERBLOCK, count=1)[0]
    if not OLDEST_VERSION <= row["version"] <= VERSION:
        raise ForeignPool(f"{name} has version {row['version']}, this is {VERSION}; it is left unchanged")
    geometry = DriveGeometry(int(row["slab_bytes"]), int(row["slab_count"]), int(row["header_pages"]))
    if geometry.data_offset != row["data_offset"]:
        raise ForeignPool(f"{name} has its slabs at {row['data_offset']}, {geometry.data_offset} was expected")
    numbers = int(row["generation"]), int(row["header_pages_used"])
    if row["version"] < VERSION:
        return Superblock(row["node_id"].decode(), geometry, *numbers, upgrading=True)
    salt, generations, upgrading = int(row["salt"]), int(row["place_generations"]), bool(row["upgrading"])
    return Superblock(row["node_id"].decode(), geometry, *numbers, salt, generations, upgrading)


def place_of(field: str) -> int:
    """Return the offset of a field in a header of the pool."""
    assert POOL_HEADER.fields is not None, "it has named fields"
    return int(POOL_HEADER.fields[field][1])


def header_bytes(num_layers: int) -> int:
    """Room that the header of a chunk takes up. Raises `LayoutInvalid` for one that does not fit a page."""
    size = -(-(HEADER.itemsize + 4 * num_layers) // UNIT_BYTES) * UNIT_BYTES
    if size > PAGE_BYTES:
        raise LayoutInvalid(f"{num_layers}; the pool's headers hold {(PAGE_BYTES - 192) // 4}", field="num_layers")
    return size


def pack_header(header: Header) -> bytes:
    """A header for other nodes and the object tier, of `header_bytes(num_layers)` bytes."""
    chunk, row = header.chunk, np.zeros(1, dtype=HEADER)
    row["magic"] = HEADER_MAGIC
    row["num_layers"], row["slice_bytes"] = chunk.num_layers, chunk.slice_bytes
    row["flags"], row["durability"] = _flags(header), _LEVEL_NUMBERS[header.level]
    row["stored_ms"] = chunk.stored_ms
    body = _with_names(row, chunk)
    body[4:8] = crc32(bytes(body[CRC_FROM:])).to_bytes(4, "little")
    return bytes(body.ljust(header_bytes(chunk.num_layers), b"\0"))


def unpack_header(raw: Bytes) -> Header:
    """The header at the start of `raw`, sound, as `pack_header` makes it."""
    row = raw[: HEADER.itemsize].view(HEADER)[0]
    return _header_of(row, _checksums(raw, int(row["num_layers"])), int(row["stored_ms"]), 0)


def pack_pool_header(
    header: Header, slab: int, slot: int, generation: int, *, revision: int = 0, salt: int = 0
) -> bytes:
    """A header for a place of the pool, of `header_bytes(num_layers)` bytes."""
    packed: bytes = pack_pool_headers([header], [slab], [slot], [generation], [revision], salt)[0].tobytes()
    return packed


def pack_pool_headers(
    headers: Sequence[Header],
    slabs: Sequence[int],
    slots: Sequence[int],
    generations: Sequence[int],
    revisions: Sequence[int],
    salt: int,
) -> Bytes:
    """Headers of chunks of one shape for places of one drive, (n, `header_bytes(num_layers)`)."""
    chunks, rows = [header.chunk for header in headers], np.zeros(len(headers), dtype=POOL_HEADER)
    layers, stored = chunks[0].num_layers, np.array([chunk.stored_ms for chunk in chunks], dtype=np.int64)
    rows["type"], rows["num_layers"], rows["slice_bytes"] = _type_of(salt), layers, chunks[0].slice_bytes
    rows["slab"], rows["slot"], rows["generation"] = slabs, slots, generations
    rows["flags"] = [_flags(header) for header in headers]
    rows["durability"] = [_LEVEL_NUMBERS[header.level] for header in headers]
    rows["revision"] = np.array(revisions, dtype=np.int64) & 0xFFFF
    rows["index_generation"] = [header.generation for header in headers]
    rows["stored_ms_high"], rows["stored_ms_low"] = stored >> 32, stored & 0xFFFFFFFF
    packed, fixed = np.zeros((len(rows), header_bytes(layers)), dtype=np.uint8), POOL_HEADER.itemsize
    packed[:, :fixed] = rows.view(np.uint8).reshape(len(rows), fixed)
    packed[:, _KEY_AT:fixed] = _bytes(b"".join(map(_names, chunks))).reshape(len(rows), -1)
    stop = fixed + 4 * layers
    packed[:, fixed:stop] = np.stack([chunk.checksums for chunk in chunks]).astype("<u4", copy=False).view(np.uint8)
    view, size, start = memoryview(packed.data).cast("B"), packed.shape[1], salt >> 32
    sums = [crc32(view[at + CRC_FROM : at + stop], start) for at in range(0, len(view), size)]
    packed[:, 4:8] = np.array(sums, dtype="<u4").view(np.uint8).reshape(-1, 4)
    return packed


def unpack_pool_header(raw: Bytes) -> Header:
    """The header at the start of `raw`, sound, as `pack_pool_header` makes it."""
    row = pool_fields(raw)
    stored = int(row["stored_ms_high"]) << 32 | int(row["stored_ms_low"])
    return _header_of(row, _checksums(raw, int(row["num_layers"])), stored, int(row["index_generation"]))


def pool_fields(raw: Bytes) -> np.void:
    """The fixed fields of the pool header that `raw` starts with."""
    row: np.void = raw[: POOL_HEADER.itemsize].view(POOL_HEADER)[0]
    return row


def stored_ms(rows: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """When the chunks of pool headers were stored, milliseconds since the Unix epoch."""
    stored: npt.NDArray[np.int64] = rows["stored_ms_high"].astype(np.int64) << 32 | rows["stored_ms_low"]
    return stored


def slot_bytes(rows: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Return the bytes that each chunk takes up, by its header."""
    slices = -(-rows["slice_bytes"].astype(np.int64) // ALIGNMENT) * ALIGNMENT
    sizes: npt.NDArray[np.int64] = slices * rows["num_layers"]
    return sizes


def parents_of(rows: npt.NDArray[np.void]) -> list[bytes]:
    """Return the parent of each chunk, by its header; empty for the first of a prefix."""
    parented = (rows["flags"] & HAS_PARENT != 0).tolist()
    return [parent if has_one else b"" for parent, has_one in zip(bytes_of(rows["parent"]), parented, strict=True)]


def bytes_of(column: npt.NDArray[np.void]) -> list[bytes]:
    """Return the bytes of each row."""
    packed, size = column.tobytes(), column.dtype.itemsize
    return [packed[at : at + size] for at in range(0, len(packed), size)]


def upgrade(region: Bytes, salt: int) -> int:
    """Turn the headers of format 2 in a region of whole pages into those of format 3; how many there were.

    Their index generations are unknown. Headers of format 3 stay unchanged.
    """
    units = region.reshape(-1, UNIT_BYTES)
    view, free_from, header_count = memoryview(region.data), 0, 0
    upgraded = find_headers(region, salt)
    sizes = [header_bytes(layers) for layers in upgraded.rows["num_layers"].tolist()]
    starts = zip(upgraded.offsets.tolist(), sizes, strict=True)
    taken = {at for start, size in starts for at in range(start, start + size, UNIT_BYTES)}
    for at in (np.flatnonzero(units[:, :4].copy().view("<u4")[:, 0] == HEADER_MAGIC) * UNIT_BYTES).tolist():
        if at < free_from or at in taken:
            continue  # inside the header before it, of either format
        row = region[at : at + HEADER.itemsize].view(HEADER)[0]
        layers, room = int(row["num_layers"]), PAGE_BYTES - at % PAGE_BYTES
        if HEADER.itemsize + 4 * layers > room or int(row["durability"]) >= len(LEVELS):
            continue
        if crc32(view[at + CRC_FROM : at + HEADER.itemsize + 4 * layers]) != int(row["crc"]):
            continue
        header = unpack_header(region[at : at + room])
        raw = pack_pool_header(header, int(row["slab"]), int(row["slot"]), int(row["generation"]), salt=salt)
        region[at : at + len(raw)] = np.frombuffer(raw, dtype=np.uint8)
        free_from, header_count = at + len(raw), header_count + 1
    return header_count


def _flags(header: Header) -> int:
    return (HAS_PARENT if header.chunk.record.parent else 0) | (IN_OBJECT if header.in_object else 0)


def _with_names(row: npt.NDArray[np.void], chunk: Chunk) -> bytearray:
    body = bytearray(row.tobytes())
    body[_KEY_AT:] = _names(chunk)
    return body + chunk.checksums.astype("<u4").tobytes()


def _names(chunk: Chunk) -> bytes:
    """Return what follows the numbers of a header, 144 bytes."""
    record = chunk.record
    names = record.key + (record.parent or _ABSENT) + record.bucket + (record.parent_bucket or _ABSENT)
    return names + record.namespace


def _bytes(raw: bytes) -> Bytes:
    return np.frombuffer(raw, dtype=np.uint8)


def _header_of(row: np.void, checksums: npt.NDArray[np.uint32], at_ms: int, generation: int) -> Header:
    layers, slice_bytes = int(row["num_layers"]), int(row["slice_bytes"])
    chunk = Chunk(record_of(row), layers, slice_bytes, checksums, at_ms)
    return Header(chunk, LEVELS[int(row["durability"])], bool(int(row["flags"]) & IN_OBJECT), generation)


def _checksums(raw: Bytes, count: int) -> npt.NDArray[np.uint32]:
    return raw[HEADER.itemsize : HEADER.itemsize + 4 * count].view("<u4").astype(np.uint32)


def _type_of(salt: int) -> int:
    return (_TYPE ^ salt) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class FoundHeaders:
    """Sound headers of a region: where each starts in it, and its fixed fields."""

    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.void]


def find_headers(region: Bytes, salt: int = 0) -> FoundHeaders:
    """Find the sound headers of a region of whole pages, by stride: none inside another one."""
    units = region.reshape(-1, UNIT_BYTES)
    offsets = np.flatnonzero(units[:, :4].copy().view("<u4")[:, 0] == _type_of(salt)) * UNIT_BYTES
    rows = rows_at(region, offsets)
    ends = offsets + HEADER.itemsize + 4 * rows["num_layers"].astype(np.int64)
    fits = (ends <= (offsets // PAGE_BYTES + 1) * PAGE_BYTES) & (rows["durability"] < len(LEVELS))
    view, start_value, free_from = memoryview(region.data), salt >> 32, 0
    keep = np.zeros(len(offsets), dtype=bool)
    columns = (fits.tolist(), offsets.tolist(), ends.tolist(), rows["crc"].tolist())
    for index, (fit, start, stop, crc) in enumerate(zip(*columns, strict=True)):
        if fit and start >= free_from and crc32(view[start + CRC_FROM : stop], start_value) == crc:
            keep[index], free_from = True, stop
    return FoundHeaders(offsets[keep], rows[keep])


def rows_at(region: Bytes, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """The fixed fields of the headers that start at `offsets` of a region."""
    rows = region.reshape(-1, UNIT_BYTES)[offsets // UNIT_BYTES, : POOL_HEADER.itemsize]
    return np.ascontiguousarray(rows).view(POOL_HEADER)[:, 0]


def joined(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Runs (first, count) of consecutive pages, so that they are written in one piece."""
    runs: list[tuple[int, int]] = []
    for page in sorted(set(pages)):
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
