"""Drives that fail, lie, fill up or are slow: chunks are healed or missing, never wrong, and no request hangs."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import pytest

from quire.model.durability import Durability
from quire.model.errors import CorruptData
from quire.model.iocb import Contexts, Op
from quire_storage.core.chunks import Chunk, Copy
from quire_storage.core.pool.slots import Shape
from quire_storage.errors import DriveFailed
from tests.integration.engine.disk import SimDisk
from tests.integration.engine.rig import SHAPE, Engine, key_of, payload_of, with_settings


async def _stored(numbers: list[int], **settings: object) -> tuple[SimDisk, Engine]:
    """Chunks on the drives and not in memory."""
    disk = SimDisk()
    engine = await Engine(disk, with_settings(**settings)).start()
    await engine.put(numbers, Durability.LOCAL)
    await engine.stop()
    return disk, await Engine(disk, with_settings(**settings)).start()


def _place(engine: Engine, number: int, layer: int) -> tuple[str, int]:
    """Drive and offset of a slice."""
    place = engine.place(number)
    assert place is not None
    return engine.drives[place.drive], engine.pool.map.data_offset(
        place.drive
    ) + place.offset + layer * place.layer_stride


@pytest.mark.parametrize("layer", range(SHAPE.num_layers))
@pytest.mark.parametrize("byte", [0, 1, 511, 512, 2047, 4095])
async def test_a_flipped_payload_byte_is_healed_from_another_copy(layer: int, byte: int) -> None:
    """On the drive too: the next reader finds it whole. Its neighbours never notice."""
    disk, engine = await _stored(list(range(8)))
    name, offset = _place(engine, 5, layer)
    disk.files[name].now[offset + byte] ^= 0x10
    engine.copies[key_of(5)] = payload_of(5)
    expected = np.stack([payload_of(each) for each in range(8)], axis=1)
    assert np.array_equal(await engine.get(list(range(8))), expected)
    assert (engine.integrity.corrupt, engine.integrity.healed) == (1, 1)
    assert disk.files[name].now[offset + byte] == payload_of(5)[layer, byte]
    assert np.array_equal(await engine.get(list(range(8))), expected)
    assert engine.integrity.corrupt == 1
    await engine.stop()


async def test_a_flipped_byte_without_another_copy_is_a_miss() -> None:
    """A copy that is wrong itself heals nothing."""
    disk, engine = await _stored(list(range(8)))
    name, offset = _place(engine, 5, 1)
    disk.files[name].now[offset] ^= 1
    engine.copies[key_of(5)] = payload_of(6)
    with pytest.raises(CorruptData):
        await engine.get(list(range(8)))
    assert engine.withdrawn == [key_of(5)]
    assert np.array_equal((await engine.get([4, 6]))[:, 1], payload_of(6))
    await engine.stop()


async def test_the_scrubber_finds_and_heals_what_is_not_read() -> None:
    disk, engine = await _stored(list(range(8)))
    name, offset = _place(engine, 2, 0)
    disk.files[name].now[offset] ^= 1
    lost_name, lost_offset = _place(engine, 6, 2)
    disk.files[lost_name].now[lost_offset] ^= 1
    engine.copies[key_of(2)] = payload_of(2)
    scrubbing = asyncio.create_task(engine.integrity.scrub(1 << 40))
    async with asyncio.timeout(10):
        while engine.integrity.scrubbed < 8:
            await asyncio.sleep(0.01)
    scrubbing.cancel()
    assert disk.files[name].now[offset] == payload_of(2)[0, 0]
    assert engine.withdrawn == [key_of(6)]
    assert engine.has(6) is False
    await engine.stop()


@pytest.mark.parametrize("block_bytes", [SHAPE.bytes - 4096, SHAPE.bytes, 1 << 20])
async def test_the_scrubber_reads_chunks_together(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that share a block are read at once; only an unsound chunk is read again alone."""
    numbers = list(range(40))
    disk, engine = await _stored(numbers, block_bytes=block_bytes)
    engine.copies[key_of(7)] = payload_of(7)
    name, offset = _place(engine, 7, SHAPE.num_layers - 1)
    disk.files[name].now[offset + 4095] ^= 1
    pinned, alone, pin = list[int](), list[bytes](), engine.tiers.pinned

    def counted(keys: Sequence[bytes]) -> AbstractContextManager[list[Copy]]:
        pinned.append(len(keys))
        return pin(keys)

    scrub_one = engine.integrity._scrub_one

    async def noted(key: bytes) -> None:
        alone.append(key)
        await scrub_one(key)

    monkeypatch.setattr(engine.tiers, "pinned", counted)
    monkeypatch.setattr(engine.integrity, "_scrub_one", noted)
    scrubbing = asyncio.create_task(engine.integrity.scrub(1 << 40))
    async with asyncio.timeout(30):
        while engine.integrity.scrubbed < len(numbers):
            await asyncio.sleep(0.01)
    scrubbing.cancel()
    assert sorted(alone) == [key_of(number) for number in (numbers if block_bytes < SHAPE.bytes else [7])]
    assert len(pinned) - len(alone) <= 4, "the first by itself, to learn how large they are"
    assert disk.files[name].now[offset + 4095] == payload_of(7)[-1, 4095] and engine.integrity.healed == 1
    await engine.stop()


@pytest.mark.parametrize("answer", [-errno.EIO, 0, 100, 4095])
async def test_read_errors_and_short_reads_are_healed_or_a_miss(answer: int) -> None:
    """The drive answers with an error, nothing, or part of it; stale memory never passes for its bytes."""
    disk, engine = await _stored(list(range(8)))
    _, offset = _place(engine, 3, 1)
    disk.fault = lambda op, file, at, length: answer if op is Op.READ and at <= offset < at + length else None
    engine.copies[key_of(3)] = payload_of(3)
    around = [number for number in range(8) if number != 3]
    for number in around:
        engine.copies[key_of(number)] = payload_of(number)
    expected = np.stack([payload_of(each) for each in range(8)], axis=1)
    assert np.array_equal(await engine.get(list(range(8))), expected)
    assert engine.ring.errors_by_file
    await engine.stop()


async def test_a_drive_that_takes_no_writes_is_used_no_more() -> None:
    """Its share goes to the other drive, what lay on it only is lost and said so, the acknowledgement holds."""
    disk, engine = await _stored(list(range(16)))
    on_first = [each for each in range(16) if _place(engine, each, 0)[0] == "a"]
    assert 0 < len(on_first) < 16
    disk.fault = lambda op, file, at, length: -errno.EIO if file == 0 and op is not Op.READ else None
    await engine.put(list(range(16, 32)), Durability.LOCAL)
    assert sorted(engine.withdrawn) == [key_of(each) for each in on_first]
    disk.fault = lambda op, file, at, length: None
    rest = [each for each in range(32) if each not in on_first]
    assert np.array_equal(await engine.get(rest), np.stack([payload_of(each) for each in rest], axis=1))
    await engine.stop()
    again = await Engine(disk).start()
    assert np.array_equal(await again.get(rest), np.stack([payload_of(each) for each in rest], axis=1))
    await again.stop()


async def test_a_slow_drive_is_waited_for() -> None:
    """A tenth of a second per batch: stores are acknowledged, readers get their bytes, cancelled ones let go."""
    disk, engine = await _stored(list(range(16)))
    disk.delay_s = 0.1
    storing = asyncio.create_task(engine.put(list(range(16, 24)), Durability.LOCAL))
    reading = asyncio.create_task(engine.get(list(range(16))))
    hasty = asyncio.create_task(engine.get(list(range(8))))
    await asyncio.sleep(0.05)
    hasty.cancel()
    async with asyncio.timeout(20):
        assert np.array_equal(await reading, np.stack([payload_of(each) for each in range(16)], axis=1))
        await storing
        with pytest.raises(asyncio.CancelledError):
            await hasty
        assert np.array_equal((await engine.get([20]))[:, 0], payload_of(20))
    assert engine.arena.free_blocks == 4
    await engine.stop()


async def test_no_drive_takes_writes() -> None:
    """Memory still does; what asks for a drive is told that there is none."""
    disk, engine = await _stored([0])
    disk.fault = lambda op, file, at, length: -errno.ENOSPC if op is Op.WRITE else None
    with pytest.raises(DriveFailed, match="ENOSPC"):
        await engine.put([8], Durability.LOCAL)
    assert engine.has(8) is False
    await engine.put([16], Durability.MEMORY)
    assert np.array_equal((await engine.get([16]))[:, 0], payload_of(16))
    with pytest.raises(DriveFailed, match="no drive is left"):
        await engine.put([24], Durability.LOCAL)
    await engine.stop()


async def test_a_full_pool_evicts_leaves_and_keeps_what_is_pinned() -> None:
    """Twice as much as the drives hold, in chains of eight: no chunk stays whose parent went."""
    disk = SimDisk()
    engine = await Engine(disk, with_settings(arena_bytes=1 << 17, drive_bytes=1664 << 10)).start()
    capacity = engine.pool.map.capacity_bytes // SHAPE.slot_bytes
    engine.pinned = {key_of(number) for number in range(8)}
    total = 2 * capacity // 8 * 8
    for first in range(0, total, 8):
        await engine.put(list(range(first, first + 8)), Durability.LOCAL)
    assert engine.pool.map.used_bytes <= engine.pool.map.capacity_bytes
    here = {number for number in range(total) if engine.has(number)}
    assert set(range(8)) <= here, "leases pin"
    assert len(here) > capacity // 2
    for number in here:
        assert number % 8 == 0 or number - 1 in here, "prefixes stay whole"
        assert np.array_equal((await engine.get([number]))[:, 0], payload_of(number))
    assert sorted(engine.evicted) == sorted(key_of(number) for number in set(range(total)) - here)
    await engine.stop()


async def test_far_more_than_memory_comes_back_whole() -> None:
    """Ten times the arena, read in one delivery larger than all of it, twice."""
    disk = SimDisk()
    config = with_settings(arena_bytes=1 << 17, drive_bytes=8 << 20)
    engine = await Engine(disk, config).start()
    numbers = list(range(104))
    for first in range(0, 104, 4):
        await engine.put(numbers[first : first + 4], Durability.MEMORY if first % 8 else Durability.LOCAL)
    expected = np.stack([payload_of(each) for each in numbers], axis=1)
    assert len(numbers) * SHAPE.slot_bytes > 9 * engine.arena.slots.capacity_bytes
    for _ in range(2):
        assert np.array_equal(await engine.get(numbers), expected)
    assert engine.residency.hits["disk"] > 0
    await engine.clean()
    # Small enough and used again: it moves into memory and is read from there.
    for _ in range(3):
        await engine.get(numbers[:4])
    before = engine.residency.hits["memory"]
    assert np.array_equal(await engine.get(numbers[:4]), expected[:, :4])
    assert engine.residency.hits["memory"] == before + 4
    await engine.stop()


async def test_a_drop_does_not_hurt_a_reader() -> None:
    """Chunks held by a delivery keep their slots, in memory and on the drive, until it lets go."""
    _, engine = await _stored(list(range(8)))
    held = engine.tiers.pin([key_of(number) for number in range(8)])
    assert await engine.drop(list(range(8))) == 8
    used = engine.pool.map.used_bytes
    await engine.put(list(range(50, 58)), Durability.LOCAL)
    assert engine.pool.map.used_bytes == used + 8 * SHAPE.slot_bytes
    for index, copy in enumerate(held.copies):
        found = await engine.integrity.heal(copy)
        assert found is not None and np.array_equal(found, payload_of(index))
    engine.tiers.unpin(held)
    assert engine.pool.map.used_bytes == used
    await engine.stop()


async def test_a_layer_with_many_layers_and_a_slice_that_fills_a_block() -> None:
    """Shapes at the edges: 900 layers, and slices of one staging block."""
    disk = SimDisk()
    engine = await Engine(disk, with_settings(arena_bytes=16 << 20, slab_bytes=4 << 20, drive_bytes=16 << 20)).start()
    for shape, number in ((Shape(900, 4096), 1), (Shape(2, 1 << 14), 2), (Shape(7, 100), 3)):
        await engine.put([number], Durability.LOCAL, shape=shape)
    await engine.stop()
    settings = with_settings(arena_bytes=1 << 20, slab_bytes=1 << 16, drive_bytes=16 << 20)
    again = await Engine(disk, settings).start()
    for shape, number in ((Shape(2, 1 << 14), 2), (Shape(7, 100), 3)):
        assert np.array_equal((await again.get([number], shape))[:, 0], payload_of(number, 0, shape))
    assert again.has(1)
    await again.stop()


async def test_an_upload_that_ends_late_does_not_touch_who_has_the_slot_now() -> None:
    """The chunk was dropped while its object was written, and its slot given to another: that one's header stays."""
    disk, engine = await _stored([1])
    found = await engine.integrity.sound(key_of(1))
    assert found is not None
    await engine.drop([1])
    await engine.put([2], Durability.LOCAL)
    engine.tiers.uploaded(found[0], 1)
    await engine.stop()
    again = await Engine(disk).start()
    assert again.has(1) is False
    assert np.array_equal((await again.get([2]))[:, 0], payload_of(2))
    await again.stop()


async def test_a_heal_that_ends_late_does_not_touch_who_has_the_slot_now() -> None:
    disk, engine = await _stored([1])
    name, offset = _place(engine, 1, 0)
    disk.files[name].now[offset] ^= 1
    come = asyncio.Event()

    async def slow_copies(chunk: Chunk) -> AsyncIterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
        await come.wait()
        yield payload_of(1)

    engine.integrity._copies = slow_copies
    reading = asyncio.create_task(engine.get([1]))
    await asyncio.sleep(0.05)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await engine.drop([1])
    await engine.put(list(range(2, 12)), Durability.LOCAL)
    come.set()
    await asyncio.sleep(0.05)
    await engine.stop()
    again = await Engine(disk).start()
    numbers = list(range(2, 12))
    assert np.array_equal(await again.get(numbers), np.stack([payload_of(each) for each in numbers], axis=1))
    assert again.integrity.corrupt == 0
    await again.stop()


async def test_a_drive_that_died_unnoticed_is_found_by_a_reader() -> None:
    """Nothing was written since: the reader gets its bytes from another copy, and the drive is used no more."""
    disk, engine = await _stored([1])
    (name, _) = _place(engine, 1, 0)
    file = list(disk.files).index(name)
    disk.fault = lambda op, which, offset, length: -errno.EIO if which == file else None
    engine.copies[key_of(1)] = payload_of(1)
    assert np.array_equal((await engine.get([1]))[:, 0], payload_of(1))
    assert engine.pool.map.failed_drives() == {file}
    await engine.stop()


async def test_raising_waits_for_a_write_that_is_on_its_way() -> None:
    """A chunk that the flusher is writing is not on the drive yet: `local` is acknowledged only when it is."""
    disk = SimDisk()
    engine = await Engine(disk).start()
    disk.delay_s = 0.05
    await engine.put([1, 2], Durability.MEMORY)
    await asyncio.sleep(0.01)  # the flusher has begun
    await engine.put([1, 2], Durability.LOCAL)
    disk.dead = True
    await engine.stop()
    disk.delay_s = 0.0
    disk.crash()
    again = await Engine(disk).start()
    assert np.array_equal(await again.get([1, 2]), np.stack([payload_of(1), payload_of(2)], axis=1))
    assert again.pool.map.used_bytes == 2 * SHAPE.slot_bytes, "written once"
    await again.stop()


async def test_shapes_may_be_mixed_in_one_store_of_a_node() -> None:
    """As replication does it: each shape is written by itself."""
    disk = SimDisk()
    engine = await Engine(disk).start()
    other = Shape(2, 8192)
    await engine.put([1, 2], Durability.MEMORY)
    await engine.put([9], Durability.MEMORY, shape=other)
    await engine.tiers.raise_level([key_of(number) for number in (1, 9, 2)], Durability.LOCAL)
    await engine.stop()
    again = await Engine(disk).start()
    assert np.array_equal((await again.get([9], other))[:, 0], payload_of(9, 0, other))
    assert np.array_equal(await again.get([1, 2]), np.stack([payload_of(1), payload_of(2)], axis=1))
    await again.stop()


async def test_the_loss_of_a_drive_does_not_empty_the_others() -> None:
    """What lay on the lost one counts no more: the good one is not over its watermark because of it."""
    disk, engine = await _stored(list(range(64)))
    on_good = [each for each in range(64) if _place(engine, each, 0)[0] == "b"]
    disk.fault = lambda op, file, at, length: -errno.EIO if file == 0 and op is not Op.READ else None
    await engine.put([100], Durability.LOCAL)
    await asyncio.sleep(0.1)
    assert engine.evicted == []
    assert all(engine.has(each) for each in on_good)
    await engine.stop()


async def test_what_memory_alone_had_of_a_lost_drive_is_written_to_another() -> None:
    disk = SimDisk()
    engine = await Engine(disk).start()
    await engine.put(list(range(8)), Durability.LOCAL)
    disk.fault = lambda op, file, at, length: -errno.EIO if file == 0 and op is not Op.READ else None
    await engine.put([8], Durability.LOCAL)
    await engine.clean()
    assert {_place(engine, each, 0)[0] for each in range(8)} == {"b"}
    await engine.stop()


async def test_a_cancelled_reader_of_many_small_slices_is_held_until_the_drives_let_go() -> None:
    """More contexts than one IOCB carries: all of them are waited for."""
    disk, engine = await _stored([1])
    disk.delay_s = 0.05
    count = 5000
    none = np.zeros(count, dtype=np.int64)
    where = Contexts(none, none + (1 << 20), none + 4096, none + engine.arena.address)
    reading = asyncio.create_task(engine.ring.read(where))
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert not engine.ring._iocbs
    await engine.stop()
