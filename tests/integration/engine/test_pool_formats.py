"""What a pool says of itself: headers that no tenant can forge, superblocks that may rot, pools of format 2."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from isal.isal_zlib import crc32

from quire.model.chunk_object import CRC_FROM, HEADER, HEADER_MAGIC
from quire.model.durability import Durability, OnExisting
from quire.model.errors import QuireError
from quire_storage.core.checksums import row_checksums
from quire_storage.core.chunks import Chunk
from quire_storage.core.pool.format import (
    HEADERS_OFFSET,
    PAGE_BYTES,
    POOL_HEADER,
    find_headers,
    pack_superblock,
    pool_fields,
    read_superblock,
    stored_ms,
)
from quire_storage.core.pool.slots import Shape
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import SHAPE, Engine, payload_of, record_of, with_settings

NUMBERS = list(range(16))
TALL = Shape(200, 512)
CONFIG = with_settings(slab_bytes=1 << 20, drive_bytes=24 << 20, arena_bytes=8 << 20)


def _slice_of(size: int, crc: int) -> bytes:
    """Bytes whose CRC-32 is `crc`, as anybody can choose them."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0xEDB88320 if value & 1 else 0)
        table.append(value)
    back = {entry >> 24: value for value, entry in enumerate(table)}
    body, want = bytes(size - 4), crc ^ 0xFFFFFFFF
    for _ in range(4):
        value = back[want >> 24]
        want = ((want ^ table[value]) << 8 | value) & 0xFFFFFFFF
    return body + (want ^ zlib.crc32(body) ^ 0xFFFFFFFF).to_bytes(4, "little")


def _forged(dtype: np.dtype[np.void], first: int, generation: int) -> bytes:
    """A header of one layer for slab 0, slot 1, as a tenant would write it who knows all but the pool's salt."""
    row = np.zeros(1, dtype=dtype)
    names = row.dtype.names
    assert names is not None
    row[names[0]], row["generation"], row["slot"] = first, generation, 1
    row["num_layers"], row["slice_bytes"], row["durability"] = 1, 5 * 4096, 1
    body = bytearray(row.tobytes()) + b"\0\0\0\0"
    body[4:8] = zlib.crc32(bytes(body[CRC_FROM:])).to_bytes(4, "little")
    return bytes(body)


async def _store_forged(engine: Engine, number: int, header: bytes) -> None:
    """A chunk whose 81st slice and those behind it have checksums that spell `header`, in its header's second unit."""
    payload = np.zeros((TALL.num_layers, TALL.slice_bytes), dtype=np.uint8)
    for at, word in enumerate(np.frombuffer(header, dtype="<u4").tolist()):
        payload[80 + at] = np.frombuffer(_slice_of(TALL.slice_bytes, word), dtype=np.uint8)
    async with engine.tiers.reserved(TALL, 1) as slots:
        engine.tiers.lay(slots, 0, payload)
        chunk = Chunk(record_of(number, 1), TALL.num_layers, TALL.slice_bytes, row_checksums(payload))
        async with engine.tiers.storing(slots, [chunk], Durability.LOCAL, OnExisting.SKIP) as stored:
            assert stored.now()


@pytest.mark.parametrize("generation", [1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize(("dtype", "first"), [(HEADER, HEADER_MAGIC), (POOL_HEADER, 0x33435751)])
async def test_checksums_that_a_tenant_chose_are_no_header(
    dtype: np.dtype[np.void], first: int, generation: int
) -> None:
    """Finding D4: they were found, and took the slots of 16 chunks of others."""
    disk = SimDisk()
    engine = await Engine(disk, CONFIG, drives=("a",)).start()
    await engine.put(NUMBERS, Durability.LOCAL)
    await _store_forged(engine, 1000, _forged(dtype, first, generation))
    await engine.stop()
    engine = await Engine(disk, CONFIG, drives=("a",)).start()
    assert all(map(engine.has, [*NUMBERS, 1000]))
    async with asyncio.timeout(20):
        await engine.put([500], Durability.LOCAL)
    await engine.stop()


async def test_a_torn_first_unit_shows_no_header_behind_it() -> None:
    """What a power cut leaves of a header of two units: the second one, which holds what a tenant chose."""
    disk = SimDisk()
    engine = await Engine(disk, CONFIG, drives=("a",)).start()
    await engine.put(NUMBERS, Durability.LOCAL)
    await _store_forged(engine, 1000, _forged(POOL_HEADER, 0x33435751, 1 << 40))
    place = engine.place(1000)
    assert place is not None
    await engine.stop()
    disk.files["a"].now[HEADERS_OFFSET + place.header : HEADERS_OFFSET + place.header + 512] = bytes(512)
    engine = await Engine(disk, CONFIG, drives=("a",)).start()
    assert all(map(engine.has, NUMBERS)) and not engine.has(1000)
    await engine.stop()


@pytest.mark.parametrize("which", [0, 1])
async def test_one_rotten_superblock_costs_nothing(which: int) -> None:
    """Finding D5: the other one knew of no header pages, and later places got generations that were older."""
    disk = SimDisk()
    engine = await Engine(disk).start()
    await engine.put(NUMBERS, Durability.LOCAL)
    await engine.stop()
    disk.files["a"].now[which * PAGE_BYTES + 100] ^= 1
    engine = await Engine(disk).start()
    assert all(map(engine.has, NUMBERS))
    await engine.put([100], Durability.LOCAL)
    await engine.drop([3])
    await engine.put([3], Durability.LOCAL, version=1)
    await engine.stop()
    head = bytes(disk.files["a"].now[: 2 * PAGE_BYTES])
    assert head[:PAGE_BYTES] == head[PAGE_BYTES:], "both were written again"
    disk.files["a"].now[(1 - which) * PAGE_BYTES + 100] ^= 1
    engine = await Engine(disk).start()
    assert all(map(engine.has, [*NUMBERS, 100]))
    assert np.array_equal((await engine.get([3]))[:, 0], payload_of(3, version=1))
    await engine.stop()


def _as_format_2(disk: SimDisk, name: str) -> None:
    """Write a drive's superblocks and headers as the releases before 0.3 did."""
    now = disk.files[name].now
    block = read_superblock(bytes(now[: 2 * PAGE_BYTES]), "node", name)
    raw = bytearray(pack_superblock(block))
    raw[12:16] = (2).to_bytes(4, "little")
    salted = raw.index(block.salt.to_bytes(8, "little"))
    raw[salted : salted + 20] = bytes(20)
    raw[8:12] = crc32(bytes(raw[12:])).to_bytes(4, "little")
    now[: 2 * PAGE_BYTES] = bytes(raw) * 2
    region = np.frombuffer(now, dtype=np.uint8)[HEADERS_OFFSET : HEADERS_OFFSET + block.header_pages_used * PAGE_BYTES]
    for at in find_headers(region, block.salt).offsets.tolist():
        new, old = pool_fields(region[at:]), np.zeros(1, dtype=HEADER)
        for field in ("generation", "slab", "slot", "num_layers", "slice_bytes", "flags", "durability"):
            old[field] = new[field]
        old["magic"], old["stored_ms"] = HEADER_MAGIC, stored_ms(np.array([new]))[0]
        body = bytearray(old.tobytes())
        end = HEADER.itemsize + 4 * int(new["num_layers"])
        body[48:192] = region[at + 48 : at + 192].tobytes()
        body += region[at + HEADER.itemsize : at + end].tobytes()
        body[4:8] = crc32(bytes(body[CRC_FROM:])).to_bytes(4, "little")
        region[at : at + len(body)] = np.frombuffer(body, dtype=np.uint8)


async def _of_format_2(disk: SimDisk, shapes: Sequence[Shape]) -> None:
    engine = await Engine(disk, CONFIG, drives=("a",)).start()
    for index, shape in enumerate(shapes):
        await engine.put([index], Durability.LOCAL, shape=shape)
    await engine.stop()
    _as_format_2(disk, "a")
    disk.files["a"].durable[:] = disk.files["a"].now
    disk.files["a"].pending.clear()


SHAPES = [SHAPE, TALL, Shape(80, 512), Shape(81, 512), SHAPE]


async def test_a_pool_of_format_2_is_upgraded_in_place() -> None:
    disk = SimDisk()
    await _of_format_2(disk, SHAPES)
    for _ in range(2):
        engine = await Engine(disk, CONFIG, drives=("a",)).start()
        for index, shape in enumerate(SHAPES):
            assert np.array_equal((await engine.get([index], shape))[:, 0], payload_of(index, 0, shape))
        await engine.stop()
    block = read_superblock(bytes(disk.files["a"].now[: 2 * PAGE_BYTES]), "node", "a")
    assert block.salt and not block.upgrading


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("operation", range(1, 11))
async def test_a_power_cut_during_the_upgrade_loses_nothing(operation: int, seed: int) -> None:
    """Whatever sectors were written by then: headers of both formats count until the superblocks say otherwise."""
    disk = SimDisk(seed)
    await _of_format_2(disk, SHAPES)
    disk.operations, disk.fail_at = 0, operation
    with suppress(QuireError):
        engine = await Engine(disk, CONFIG, drives=("a",)).start()
        await engine.stop()
    assert disk.dead, "the power cut came after the upgrade"
    disk.crash()
    engine = await Engine(disk, CONFIG, drives=("a",)).start()
    for index, shape in enumerate(SHAPES):
        assert np.array_equal((await engine.get([index], shape))[:, 0], payload_of(index, 0, shape))
    await engine.stop()


async def test_of_a_pool_of_format_2_no_drop_decides_alone() -> None:
    """Its headers name no index entry: what the index lists stays, and gets the name of its entry."""
    disk = SimDisk()
    await _of_format_2(disk, [SHAPE, SHAPE])
    engine = await Engine(disk, CONFIG, drives=("a",)).start()
    keys = [record_of(number).key for number in (0, 1)]
    assert [engine.residency.recorded(key) for key in keys] == [0, 0]
    engine.listed[keys[0]] = 7
    assert await engine.tiers.drop({keys[0]: 5, keys[1]: 5}) == 0, "nothing is known of the second one"
    assert [engine.residency.recorded(key) for key in keys] == [7, 0]
    assert await engine.tiers.drop({keys[0]: 7}) == 1
    await engine.stop()
