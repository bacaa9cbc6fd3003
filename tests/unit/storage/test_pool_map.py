"""The pool's arithmetic: headers, slots over drives, recovery from an image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.model.chunk_object import sound_header
from quire.model.durability import Durability
from quire.model.errors import LayoutInvalid
from quire.model.records import ChunkRecord
from quire_storage.core.chunks import Chunk, Header, Placed
from quire_storage.core.pool.format import (
    PAGE_BYTES,
    DriveGeometry,
    Superblock,
    find_headers,
    header_bytes,
    pack_header,
    pack_pool_header,
    pack_superblock,
    read_superblock,
    unpack_header,
    unpack_pool_header,
)
from quire_storage.core.pool.map import PoolMap
from quire_storage.core.pool.slots import Shape
from quire_storage.errors import ForeignPool

GEOMETRY = DriveGeometry(1 << 18, 8, 24)
LARGE = DriveGeometry(1 << 18, 80, 96)  # room for all that the property test stores


def _map(images: list[npt.NDArray[np.uint8]], stripe_bytes: int = 8192, geometry: DriveGeometry = GEOMETRY) -> PoolMap:
    return PoolMap([geometry] * len(images), images, stripe_bytes)


def _images(count: int = 2, geometry: DriveGeometry = GEOMETRY) -> list[npt.NDArray[np.uint8]]:
    return [np.zeros(geometry.header_pages * PAGE_BYTES, dtype=np.uint8) for _ in range(count)]


def _chunk(number: int, shape: Shape) -> Chunk:
    key = number.to_bytes(32, "big")
    parent = (number - 1).to_bytes(32, "big") if number % 3 else b""
    sums = np.arange(shape.num_layers, dtype=np.uint32) + np.uint32(number)
    return Chunk(
        ChunkRecord(key, parent, key, key if parent else b"", b"n" * 16),
        shape.num_layers,
        shape.slice_bytes,
        sums,
        1234567890123,
    )


def _place(pool: PoolMap, chunks: list[Chunk]) -> list[Placed]:
    places = pool.take(chunks[0].shape, len(chunks))
    placed = [Placed(Header(chunk), place) for chunk, place in zip(chunks, places, strict=True)]
    pool.commit(placed)
    return placed


@given(
    st.integers(1, 976),
    st.integers(1, 1 << 28),
    st.sampled_from(list(Durability)),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_a_header_says_everything(layers: int, size: int, durability: Durability, in_object: bool, number: int) -> None:
    chunk = _chunk(number, Shape(layers, size))
    raw = pack_header(Header(chunk, durability, in_object))
    assert len(raw) == header_bytes(layers) <= PAGE_BYTES and sound_header(raw) is not None
    again = unpack_header(np.frombuffer(raw, dtype=np.uint8))
    assert again.chunk.record == chunk.record and again.chunk.same_content(chunk)
    assert (again.chunk.namespace, again.chunk.stored_ms) == (chunk.namespace, chunk.stored_ms)
    assert (again.level, again.in_object) == (durability, in_object)
    header = Header(chunk, durability, in_object, number << 32 | 1)
    stored = np.frombuffer(pack_pool_header(header, 5, 7, 99, revision=3, salt=number << 20), dtype=np.uint8)
    kept = unpack_pool_header(stored)
    assert kept.chunk.same_content(chunk) and kept.chunk.record == chunk.record
    assert (kept.chunk.namespace, kept.chunk.stored_ms) == (chunk.namespace, chunk.stored_ms)
    assert (kept.level, kept.in_object, kept.generation) == (durability, in_object, number << 32 | 1)


def test_a_thousand_layers_do_not_fit_a_header() -> None:
    with pytest.raises(LayoutInvalid, match="num_layers"):
        header_bytes(977)


def test_consecutive_chunks_go_round_the_drives() -> None:
    """One layer of many chunks draws on all drives, in runs of the stripe."""
    pool = _map(_images(2), stripe_bytes=8192)
    drives = [place.drive for place in pool.take(Shape(4, 4096), 16)]
    assert drives == [0, 0, 1, 1] * 4
    assert [place.drive for place in pool.take(Shape(2, 8192), 4)] == [0, 1, 0, 1]


def test_a_full_drive_leaves_its_share_to_the_others_and_a_failed_one_gets_none() -> None:
    shape = Shape(4, 4096)
    pool = _map(_images(2), stripe_bytes=4096)
    everything = 2 * 8 * 16
    places = pool.take(shape, everything + 1)
    assert len(places) == everything
    pool.release(places)
    assert pool.used_bytes == 0
    places = pool.take(shape, everything)
    pool.release([place for place in places if place.drive == 1][:5])
    assert {place.drive for place in pool.take(shape, 5)} == {1}
    pool = _map(_images(2), stripe_bytes=4096)
    pool.fail(0)
    assert {place.drive for place in pool.take(shape, 10)} == {1}


def test_slots_without_a_page_for_their_headers_hide_no_others() -> None:
    """The allocator takes the free slots of the lowest slab first, although no page is left for their headers."""
    shape = Shape(4, 4096)  # 16 to a slab, 8 headers to a page
    pool = _map(_images(1, DriveGeometry(1 << 18, 8, 5)), geometry=DriveGeometry(1 << 18, 8, 5))
    places = pool.take(shape, 100)
    assert len(places) == 40, "two slabs, and half of the third"
    assert pool.release(places[:16]) > 16, "a slab that is empty may have any shape, and the third takes its pages"
    assert len(pool.take(shape, 8)) == len(pool.take(shape, 8)) == 8, "the first slab again, without a page of its own"
    pool.release(places[16:20])
    assert [place.offset for place in pool.take(shape, 100)] == [place.offset for place in places[16:20]]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([Shape(3, 4096), Shape(60, 512), Shape(2, 10_000)]), st.integers(1, 9)),
        min_size=1,
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_recovery_finds_what_is_committed_and_nothing_else(stores: list[tuple[Shape, int]], chance: object) -> None:
    """Chunks of several shapes stored and forgotten in any order: a second map, of the same images, has the same."""
    images = _images(2, LARGE)
    pool = _map(images, geometry=LARGE)
    alive: dict[bytes, Placed] = {}
    number = 0
    for shape, count in stores:
        chunks = [_chunk(number + index, shape) for index in range(count)]
        number += count
        alive.update({placed.header.chunk.key: placed for placed in _place(pool, chunks)})
        for key in [key for key in alive if chance.random() < 0.3]:  # type: ignore[attr-defined]
            placed = alive.pop(key)
            pool.forget([placed])
            pool.release([placed.place])
    again = _map([image.copy() for image in images], geometry=LARGE)
    for drive in range(2):
        assert again.recover(drive, LARGE.header_pages) == {}
    assert set(again.keys()) == set(alive) == set(pool.keys())
    assert again.used_bytes == pool.used_bytes
    for key, placed in alive.items():
        found = again.get(key)
        assert found is not None and found.place == placed.place
        assert found.header.chunk.same_content(placed.header.chunk)
        assert found.header.chunk.record == placed.header.chunk.record
    assert {entry[0] for entry in again.entries()} == set(alive)
    taken = {(placed.place.drive, placed.place.offset) for placed in alive.values()}
    fresh = again.take(Shape(3, 4096), 4)
    assert not taken & {(place.drive, place.offset) for place in fresh}


def test_of_two_headers_for_one_key_the_newer_counts() -> None:
    """A crash between a re-store and the end of a drop can leave both; the older slot is free and its header zeroed."""
    images = _images(1)
    pool = _map(images)
    first, second = _chunk(1, Shape(3, 4096)), _chunk(1, Shape(3, 4096))
    _place(pool, [first])
    newer = _place(pool, [second])[0]
    again = _map([images[0].copy()])
    assert len(again.recover(0, GEOMETRY.header_pages)[0]) == 1
    found = again.get(first.record.key)
    assert found is not None and found.place == newer.place
    assert again.used_bytes == Shape(3, 4096).slot_bytes
    assert len(find_headers(again.image(0)).offsets) == 1


def test_a_copy_that_is_written_late_does_not_hide_the_newer_one() -> None:
    """Its header comes back after the newer one's, and is taken off again: the newer one lay on the drive unfound, and
    its slot was taken for ever. After a crash in between the older bytes were found.
    """
    images = _images()
    pool, chunk, newer = _map(images), _chunk(1, Shape(2, 4096)), _chunk(1, Shape(2, 4096))
    late, place = _place(pool, [chunk])[0], _place(pool, [newer])[0]
    pool.commit([place])
    pool.commit([late])
    found = pool.get(chunk.key)
    assert found is not None and found.place == place.place
    again = _map([image.copy() for image in images])
    assert again.recover(0, GEOMETRY.header_pages) == {}
    assert again.recover(1, GEOMETRY.header_pages) == {0: [0]}
    recovered = again.get(chunk.key)
    assert recovered is not None and recovered.place == place.place
    pool.forget([late])
    pool.release([late.place])
    found = pool.get(chunk.key)
    assert found is not None and found.place == place.place
    pool.commit([place])
    assert pool.age(chunk.key) == again.age(chunk.key), "a header that is written again keeps its age"


def test_superblocks_of_others_are_refused() -> None:
    def both(block: bytes) -> bytes:
        return block + block

    mine = Superblock("me", GEOMETRY, 3, 7)
    assert read_superblock(both(pack_superblock(mine)), "me", "/d") == mine
    with pytest.raises(ForeignPool, match="'me', this is 'you'"):
        read_superblock(both(pack_superblock(mine)), "you", "/d")
    newer = bytearray(pack_superblock(mine))
    newer[12:16] = (99).to_bytes(4, "little")
    from isal.isal_zlib import crc32

    newer[8:12] = crc32(bytes(newer[12:])).to_bytes(4, "little")
    with pytest.raises(ForeignPool, match="version 99"):
        read_superblock(both(bytes(newer)), "me", "/d")
    with pytest.raises(ForeignPool, match="no pool"):
        read_superblock(b"x" * 8192, "me", "/d")
