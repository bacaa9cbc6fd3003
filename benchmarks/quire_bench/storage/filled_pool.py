"""A storage node that starts with many chunks: their headers are written beforehand, their data is a hole.

Every slice reads as zeros and is sound.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.records import records
from quire_storage.core.chunks import Chunk, Header, Placed
from quire_storage.core.pool.format import HEADERS_OFFSET, PAGE_BYTES, DriveGeometry, Superblock, pack_superblock
from quire_storage.core.pool.map import PoolMap
from quire_storage.core.pool.slots import Shape
from quire_tools.local import LocalCluster

NODE: Final = "storage-0"
LAYOUT: Final = KvLayout(16, 1, 8, 128, Dtype.BF16)
"""64 KiB a chunk."""
SHAPE: Final = Shape(LAYOUT.num_layers, LAYOUT.slice_bytes)
_SLAB_BYTES: Final = 64 << 20
_PREFIX: Final = 200
SETTINGS: Final = {
    "QUIRE_STORAGE_OBJECT_URL": "",
    "QUIRE_STORAGE_SLAB_BYTES": str(_SLAB_BYTES),
    "QUIRE_STORAGE_CHUNK_BYTES_MIN": str(LAYOUT.chunk_bytes),
}
"""Of a cluster whose node has such a pool."""


def write_pool(folder: Path, chunks: int, space: Namespace) -> int:
    """A pool whose data region is a hole, with a sound header for each chunk; bytes of its file."""
    folder.mkdir(parents=True)
    per_slab = _SLAB_BYTES // SHAPE.slot_bytes
    slabs = -(-5 * chunks // (4 * per_slab)) + 64  # far below the watermark
    geometry = DriveGeometry(_SLAB_BYTES, slabs, -(-slabs * per_slab * 512 // PAGE_BYTES))
    image = np.zeros(geometry.header_pages * PAGE_BYTES, dtype=np.uint8)
    pool_map = PoolMap([geometry], [image], 1 << 40)
    sums = np.full(SHAPE.num_layers, isal_zlib.crc32(bytes(SHAPE.slice_bytes)), dtype=np.uint32)
    now_ms = time.time_ns() // 1_000_000
    for first in range(0, chunks, _PREFIX):
        count = min(_PREFIX, chunks - first)
        chain = records(ChunkKeys(os.urandom(32 * count)), 0, count, namespace=space.tag)
        places = pool_map.take(SHAPE, count)
        pool_map.commit(
            [
                Placed(Header(Chunk(record, SHAPE.num_layers, SHAPE.slice_bytes, sums, now_ms)), where)
                for record, where in zip(chain, places, strict=True)
            ]
        )
    write_pool_file(folder, NODE, geometry, image)
    return geometry.file_bytes


def write_pool_file(folder: Path, node_id: str, geometry: DriveGeometry, headers: npt.NDArray[np.uint8]) -> None:
    """Write a node's pool file with these headers, uint8, (bytes,); its data region is a hole."""
    block = pack_superblock(Superblock(node_id, geometry, 1, geometry.header_pages))
    with (folder / "pool.quire").open("wb") as file:
        file.write(block + block)
        file.seek(HEADERS_OFFSET)
        file.write(headers.data)
        file.truncate(geometry.file_bytes)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def listed(cluster: LocalCluster) -> int:
    """Chunks that the index lists for the node."""
    from quire_server.redis import PrefixIndex, connect

    async def ask() -> int:
        redis = connect(cluster.redis_url, timeout_s=30)
        try:
            return (await PrefixIndex(redis).listing(NODE)).count
        finally:
            await redis.aclose()

    return asyncio.run(ask())


def until(true: Callable[[], bool], within_s: float) -> None:
    """Ask twice a second. Raises `TimeoutError`."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s")
        time.sleep(0.5)
