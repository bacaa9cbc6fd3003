"""A chunk as an object of its own: L·S bytes as KV_L2TD lays them out, then its header, then the header's length.

So a range of it is a layer, and it describes itself: key, parent, layout, namespace, a CRC-32 for each layer. The
header is the one that a chunk has on a drive.

An object is named by the chunk's key and by the generation of the index entry under which it was written. A request
that the store carries out late, after its client has given up, so affects no object of a later entry.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

try:
    from isal.isal_zlib import crc32  # the same sums, some times as fast; servers have it
except ImportError:
    from zlib import crc32

from quire.model.durability import Durability
from quire.model.errors import CorruptData
from quire.model.keys import KEY_BYTES
from quire.model.records import ChunkRecord

Bytes = npt.NDArray[np.uint8]
HEADER_MAGIC: Final = 0x31435751  # "QWC1"
HAS_PARENT: Final = 1
CRC_FROM: Final = 8
HEADER: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("crc", "<u4"),
        ("generation", "<u8"),
        ("slab", "<u4"),
        ("slot", "<u4"),
        ("num_layers", "<u4"),
        ("slice_bytes", "<u4"),
        ("flags", "<u4"),
        ("durability", "<u4"),
        ("stored_ms", "<u8"),
        ("key", "V32"),
        ("parent", "V32"),
        ("bucket", "V32"),
        ("parent_bucket", "V32"),
        ("namespace", "V16"),
    ]
)
assert HEADER.itemsize == 192, "the checksums start there"
TRAILER: Final = struct.Struct("<I8s")
MAGIC: Final = b"QUIREOBJ"
_FOLDER: Final = "chunks"
_PATH: Final = re.compile(
    "chunks/(?P<first>[0-9a-f]{2})/(?:(?P<whole>[0-9a-f]{64})|(?P<rest>[0-9a-f]{62})/(?P<generation>[0-9a-f]{16}))"
)


@dataclass(frozen=True, slots=True)
class ChunkObject:
    """A sound object. `payload`: (L, S). `header`: its bytes in the object."""

    record: ChunkRecord
    payload: Bytes
    header: bytes


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """A range of an object of `size` bytes, 0 if unknown. `header`: the chunk's, if the store has it as metadata."""

    data: memoryview
    size: int = 0
    header: bytes | None = None


def object_path(key: bytes, generation: int) -> str:
    """Return the path of a chunk's object in the object tier.

    Args:
        key: Of the chunk, 32 bytes.
        generation: Of the index entry under which the object was written; 0 for an object of an earlier release.
    """
    return f"{objects_folder(key)}/{generation:016x}" if generation else f"{_FOLDER}/{key.hex()[:2]}/{key.hex()}"


def objects_folder(key: bytes) -> str:
    """Return the folder of a chunk's objects of all generations but 0."""
    name = key.hex()
    return f"{_FOLDER}/{name[:2]}/{name[2:]}"


def object_of_path(path: str) -> tuple[bytes, int] | None:
    """Return the key and the generation in a path; None if it is not the path of a chunk's object."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    if match["whole"]:
        return bytes.fromhex(match["whole"]), 0
    return bytes.fromhex(match["first"] + match["rest"]), int(match["generation"], 16)


def record_of(row: np.void) -> ChunkRecord:
    """The record in a header's fixed fields."""
    parent = int(row["flags"]) & HAS_PARENT
    return ChunkRecord(
        row["key"].tobytes(),
        row["parent"].tobytes() if parent else b"",
        row["bucket"].tobytes(),
        row["parent_bucket"].tobytes() if parent else b"",
        row["namespace"].tobytes(),
    )


def sound_header(raw: bytes) -> np.void | None:
    """Return the fixed fields of the header that `raw` starts with; None if it is invalid or damaged."""
    if len(raw) < HEADER.itemsize:
        return None
    row: np.void = np.frombuffer(raw, dtype=HEADER, count=1)[0]
    end = HEADER.itemsize + 4 * int(row["num_layers"])
    is_known = int(row["durability"]) < len(Durability) and row["num_layers"] and row["slice_bytes"]
    if int(row["magic"]) != HEADER_MAGIC or not is_known or end > len(raw):
        return None
    return row if crc32(raw[CRC_FROM:end]) == int(row["crc"]) else None


def compact_header(header: bytes) -> bytes:
    """Return a header without the zeros behind its checksums; empty for one that is not sound."""
    row = sound_header(header)
    return header[: HEADER.itemsize + 4 * int(row["num_layers"])] if row is not None else b""


def object_bytes(num_layers: int, slice_bytes: int, header_bytes: int) -> int:
    """Return the size of a chunk's object."""
    return num_layers * slice_bytes + header_bytes + TRAILER.size


def header_at_end(tail: bytes) -> bytes | None:
    """The header of a chunk object of which `tail` is the end; None where there is none, or not the whole of it."""
    if len(tail) < TRAILER.size:
        return None
    size, magic = TRAILER.unpack_from(tail, len(tail) - TRAILER.size)
    header = tail[max(0, len(tail) - TRAILER.size - size) : -TRAILER.size]
    return header if magic == MAGIC and len(header) == size else None


def with_record(header: bytes, record: ChunkRecord) -> bytes:
    """Return the header with another record and the checksum of that."""
    row, no_key = np.frombuffer(header, dtype=HEADER, count=1).copy(), bytes(KEY_BYTES)
    row["flags"] = (row["flags"] | HAS_PARENT) - (0 if record.parent else HAS_PARENT)
    row["key"], row["bucket"] = np.void(record.key), np.void(record.bucket)
    row["parent"], row["parent_bucket"] = np.void(record.parent or no_key), np.void(record.parent_bucket or no_key)
    row["namespace"] = np.void(record.namespace)
    rest = header[HEADER.itemsize :]
    row["crc"] = crc32(row.tobytes()[CRC_FROM:] + rest[: 4 * int(row["num_layers"][0])])
    return bytes(row.tobytes() + rest)


def read_chunk_object(raw: bytes) -> ChunkObject:
    """Parse an object. Raises `CorruptData` if any part of it is damaged."""
    if len(raw) < TRAILER.size + HEADER.itemsize:
        raise CorruptData(f"{len(raw)} bytes are no chunk")
    header = header_at_end(raw)
    if header is None or len(header) < HEADER.itemsize:
        raise CorruptData("no chunk's header at the end")
    row = sound_header(header)
    if row is None:
        raise CorruptData("a chunk's header that is invalid, or does not match its checksum")
    layers, slice_bytes = int(row["num_layers"]), int(row["slice_bytes"])
    if len(raw) != layers * slice_bytes + len(header) + TRAILER.size:
        raise CorruptData(f"{len(raw)} bytes, its header says {layers} × {slice_bytes}")
    payload = np.frombuffer(raw, dtype=np.uint8, count=layers * slice_bytes).reshape(layers, slice_bytes)
    sums = np.frombuffer(header, dtype="<u4", count=layers, offset=HEADER.itemsize)
    if not np.array_equal(sums, np.array([crc32(layer) for layer in payload], dtype=np.uint32)):
        raise CorruptData("a layer does not match its checksum")
    return ChunkObject(record_of(row), payload, header)


def write_chunk_object(payload: Bytes, header: bytes) -> bytes:
    """`payload`: (L, S)."""
    return b"".join([payload.tobytes(), header, TRAILER.pack(len(header), MAGIC)])
