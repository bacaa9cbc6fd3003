"""The pool in memory: which slot of which drive holds which chunk, and an image of every drive's header region.

Nothing here does I/O: methods change the image and say which header pages have to be written, in which order they
become durable is the caller's matter (see `pool_format`). A chunk on disk alone costs a row and its header in the
image; a `Chunk` is made of them on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.durability import Durability
from quire.model.keys import KEY_BYTES
from quire_storage.core.chunks import DiskPlace, Placed
from quire_storage.core.namespaces import ChunkFacts
from quire_storage.core.pool.drive import MappedDrive
from quire_storage.core.pool.format import (
    LEVELS,
    PAGE_BYTES,
    POOL_HEADER,
    UNIT_BYTES,
    DriveGeometry,
    FoundHeaders,
    bytes_of,
    find_headers,
    header_bytes,
    pack_pool_headers,
    parents_of,
    place_of,
    pool_fields,
    rows_at,
    slot_bytes,
    stored_ms,
    unpack_pool_header,
)
from quire_storage.core.pool.slots import ALIGNMENT, Shape, SlotAllocator, shape_of
from quire_storage.core.rows import KeyNumbers, KeyRows

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
_DRIVE_SHIFT: Final = 48
_SCANNED_UNITS: Final = 4096
_AGE_AT: Final = place_of("generation")
_KEY_AT: Final = place_of("key")
_NAME_AT: Final = place_of("namespace")
Pages = dict[int, list[int]]
"""By drive: header pages to write."""


class PoolMap:
    """`images`: for each drive memory of `geometry.header_pages` pages, all zero. `salts`: of each drive's pool."""

    def __init__(
        self, geometries: Sequence[DriveGeometry], images: Sequence[Bytes], stripe_bytes: int, salts: Sequence[int] = ()
    ) -> None:
        self._drives = [
            MappedDrive(
                geometry,
                image,
                SlotAllocator(geometry.slab_count * geometry.slab_bytes, geometry.slab_bytes),
                list(range(geometry.header_pages)),
            )
            for geometry, image in zip(geometries, images, strict=True)
        ]
        for drive, salt in zip(self._drives, salts, strict=False):
            drive.salt = salt
        self._where = KeyNumbers()
        self._stripe_bytes = stripe_bytes
        self._turn = 0
        self._generation = 0
        self._allocated: dict[tuple[int, int], int] = {}
        """Generations of places without a header so far, by drive and header."""

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def keys(self) -> Iterator[bytes]:
        return iter(self._where)

    @property
    def rows(self) -> KeyRows:
        """Rows of the keys, for what else knows about chunks on drives."""
        return self._where.rows

    def scan(self) -> Iterator[list[bytes]]:
        """Keys of chunks, some at a time, by the places of their headers.

        Chunks may be added and removed in between: one that stays where it is all the while is named once.
        """
        for drive in self._drives:
            first = 0
            while first < drive.pages_used * (PAGE_BYTES // UNIT_BYTES):
                yield drive.keys(first, first + _SCANNED_UNITS)
                first += _SCANNED_UNITS

    @property
    def used_bytes(self) -> int:
        return sum(drive.slots.used_bytes for drive in self._drives if not drive.failed)

    @property
    def capacity_bytes(self) -> int:
        return sum(drive.slots.capacity_bytes for drive in self._drives if not drive.failed)

    def pages_used(self, drive: int) -> int:
        """Header pages below this one may be in use."""
        return self._drives[drive].pages_used

    def image(self, drive: int) -> Bytes:
        return self._drives[drive].image

    def data_offset(self, drive: int) -> int:
        """Offset at which the slots of a drive's file begin, in bytes."""
        return self._drives[drive].geometry.data_offset

    # ---- places

    def check(self, shape: Shape) -> None:
        """Check a shape. Raises `LayoutInvalid` for chunks that the drives cannot hold."""
        header_bytes(shape.num_layers)
        for drive in self._drives:
            drive.slots.slots_per_slab(shape)

    def take(self, shape: Shape, count: int) -> list[DiskPlace]:
        """Take up to `count` slots, as many as there are, in runs that alternate between the drives.

        Raises `LayoutInvalid`; then none is taken.
        """
        size = header_bytes(shape.num_layers)
        run = max(1, self._stripe_bytes // shape.slice_room)
        places: list[DiskPlace] = []
        healthy = [index for index, drive in enumerate(self._drives) if not drive.failed]
        full: set[int] = set()
        try:
            while len(places) < count and len(full) < len(healthy):
                index = healthy[self._turn % len(healthy)]
                self._turn += 1
                if index in full:
                    continue
                in_run = min(run, count - len(places))
                got = self._take(index, shape, in_run, size)
                places += got
                if len(got) < in_run:
                    full.add(index)
        except BaseException:
            self.release(places)
            raise
        return places

    def release(self, places: Iterable[DiskPlace]) -> int:
        """Let slots be taken again, but for those of failed drives; returns for how many more chunks there may be room.

        Only when no sound header for them can come back (see `pool_format`).
        """
        room = 0
        for place in places:
            self._allocated.pop((place.drive, place.header), None)
            drive = self._drives[place.drive]
            if not drive.failed:
                self.set_listing(place, 0, False)
                emptied = drive.free([place.offset])  # such a slab may serve chunks of any shape
                room += 1 + emptied * (drive.geometry.slab_bytes // ALIGNMENT)
        return room

    # ---- headers

    def commit(self, placed: Sequence[Placed]) -> Pages:
        """Write the headers of chunks into the image (again, if they are there); the pages that this changes.

        Of two places of one key that counts which was allocated later: a copy that is leaving may be written last.
        """
        pages: Pages = {}
        groups: dict[tuple[int, Shape], list[Placed]] = {}
        for item in placed:
            groups.setdefault((item.place.drive, item.header.chunk.shape), []).append(item)
        for (drive, shape), group in groups.items():
            pages.setdefault(drive, []).extend(self._commit(self._drives[drive], shape, group))
        return pages

    def _commit(self, drive: MappedDrive, shape: Shape, group: Sequence[Placed]) -> list[int]:
        """Write the headers of chunks of one shape on one drive; the pages that this changes."""
        keys, places = [item.header.chunk.key for item in group], [item.place for item in group]
        generations = [self._generation_of(key, place) for key, place in zip(keys, places, strict=True)]
        revisions = [self._revision_at(key, place) + 1 for key, place in zip(keys, places, strict=True)]
        slabs, slots = zip(*(drive.slots.slot_of(place.offset, shape) for place in places), strict=True)
        headers = [item.header for item in group]
        packed = pack_pool_headers(headers, slabs, slots, generations, revisions, drive.salt)
        units = packed.reshape(len(group), -1, UNIT_BYTES)
        first = np.array([place.header // UNIT_BYTES for place in places])
        drive.image.reshape(-1, UNIT_BYTES)[first[:, None] + np.arange(units.shape[1])] = units
        for key, place, generation in zip(keys, places, generations, strict=True):
            if self._generation_at(self._where.get(key)) <= generation:
                self._point(key, _where_of(place))
        return [place.header // PAGE_BYTES for place in places]

    def forget(self, placed: Sequence[Placed]) -> Pages:
        """Zero headers in the image; the pages that this changes. Slots stay taken until `release`."""
        pages: Pages = {}
        for item in placed:
            chunk, place = item.header.chunk, item.place
            drive = self._drives[place.drive]
            drive.image[place.header : place.header + header_bytes(chunk.num_layers)] = 0
            if self._where.get(chunk.key) == _where_of(place):
                self._mark(_where_of(place), current=False)
                self._where.remove(chunk.key)
            pages.setdefault(place.drive, []).append(place.header // PAGE_BYTES)
        return pages

    def shape_of(self, key: bytes) -> Shape | None:
        """Return the shape of the chunk on a drive under a key."""
        where = self._where.get(key)
        if where is None:
            return None
        row = pool_fields(self._drives[where >> _DRIVE_SHIFT].image[where & ((1 << _DRIVE_SHIFT) - 1) :])
        return shape_of(int(row["num_layers"]), int(row["slice_bytes"]))

    def get(self, key: bytes) -> Placed | None:
        """Return the chunk on a drive under a key, from its header."""
        where = self._where.get(key)
        if where is None:
            return None
        index, at = where >> _DRIVE_SHIFT, where & ((1 << _DRIVE_SHIFT) - 1)
        drive = self._drives[index]
        header = unpack_pool_header(drive.image[at:])
        row = pool_fields(drive.image[at:])
        shape = header.chunk.shape
        offset = drive.slots.offset_of(int(row["slab"]), int(row["slot"]), shape)
        return Placed(header, DiskPlace(index, offset, drive.slots.layer_stride(shape), at))

    def age(self, key: bytes) -> int | None:
        """Rank of a chunk among all of the pool by when it was stored here; None if it is not here."""
        where = self._where.get(key)
        if where is None:
            return None
        return self._generation_at(where)

    def generation(self, key: bytes) -> int | None:
        """Return the generation of `listing`; None for a chunk that is not here."""
        where = self._where.get(key)
        if where is None:
            return None
        at = (where & ((1 << _DRIVE_SHIFT) - 1)) // UNIT_BYTES
        return int(self._drives[where >> _DRIVE_SHIFT].index_generations[at])

    def listing(self, place: DiskPlace) -> tuple[int, bool]:
        """Return the generation of the entry that lists the chunk at `place`, and whether it lists an object.

        0 stands for no known entry.
        """
        drive, at = self._drives[place.drive], place.header // UNIT_BYTES
        return int(drive.index_generations[at]), bool(drive.in_object[at])

    def set_listing(self, place: DiskPlace, generation: int, in_object: bool) -> None:
        """Set it in memory only: after a restart the index is read again."""
        drive, at = self._drives[place.drive], place.header // UNIT_BYTES
        drive.index_generations[at], drive.in_object[at] = generation, in_object

    def keys_beside(self, placed: Placed) -> list[bytes]:
        """Return the keys of all chunks in the same slab."""
        drive = self._drives[placed.place.drive]
        slab, _ = drive.slots.slot_of(placed.place.offset, placed.header.chunk.shape)
        keys: list[bytes] = []
        for page in drive.pages[slab].values():
            rows = find_headers(drive.image[page * PAGE_BYTES : (page + 1) * PAGE_BYTES], drive.salt).rows
            keys += [row["key"].tobytes() for row in rows]
        return keys

    def entries(self) -> list[tuple[bytes, bytes, int, Durability]]:
        """(key, parent, bytes taken up, level) of every chunk, the longest stored first."""
        parts = [rows_at(drive.image, self._headers_of(index)) for index, drive in enumerate(self._drives)]
        rows = np.concatenate(parts)
        rows = rows[np.argsort(rows["generation"], kind="stable")]
        levels = [LEVELS[level] for level in rows["durability"].tolist()]
        return list(zip(bytes_of(rows["key"]), parents_of(rows), slot_bytes(rows).tolist(), levels, strict=True))

    def places_of(self, namespaces: Iterable[bytes]) -> Iterator[tuple[Numbers, Numbers]]:
        """Ages and places of headers that may be of these namespaces, in steps."""
        starts = np.frombuffer(b"".join(name[:8] for name in namespaces), dtype=np.uint64)
        for index, drive in enumerate(self._drives):
            units, first = drive.image.reshape(-1, UNIT_BYTES), 0
            while first < drive.pages_used * (PAGE_BYTES // UNIT_BYTES):
                page = units[first : first + _SCANNED_UNITS]
                tags = page[:, _NAME_AT : _NAME_AT + 8].copy().view(np.uint64)[:, 0]
                at = np.flatnonzero(np.isin(tags, starts))
                ages = page[at, _AGE_AT : _AGE_AT + 8].copy().view("<u8")[:, 0].astype(np.uint64)
                yield ages, ((at + first) * UNIT_BYTES).astype(np.uint64) | np.uint64(index << _DRIVE_SHIFT)
                first += _SCANNED_UNITS

    def found_at(self, places: Numbers) -> list[ChunkFacts]:
        """Chunks whose headers are at these places now, in their order."""
        drives, offsets = places >> np.uint64(_DRIVE_SHIFT), places & np.uint64((1 << _DRIVE_SHIFT) - 1)
        rows, current = np.empty(len(places), dtype=POOL_HEADER), np.empty(len(places), dtype=np.bool_)
        for index in np.unique(drives).tolist():
            on_it = drives == index
            at = offsets[on_it].astype(np.int64)
            rows[on_it] = rows_at(self._drives[index].image, at)
            current[on_it] = self._drives[index].current[at // UNIT_BYTES]
        rows = rows[current]
        return list(
            map(
                ChunkFacts,
                bytes_of(rows["key"]),
                parents_of(rows),
                bytes_of(rows["namespace"]),
                slot_bytes(rows).tolist(),
                stored_ms(rows).tolist(),
            )
        )

    def fail(self, drive: int) -> list[Placed]:
        """Use a drive no more; the chunks that were on it, which are forgotten."""
        failed = self._drives[drive]
        failed.failed = True
        keys = failed.keys(0, len(failed.current))
        entries = [placed for key in keys if (placed := self.get(key)) is not None]
        for key in keys:
            self._where.remove(key)
        failed.current[:] = False
        return entries

    # ---- recovery

    @property
    def place_generations(self) -> int:
        """The greatest generation that a place has got."""
        return self._generation

    def recover(self, index: int, pages_used: int, place_generations: int = 0) -> Pages:
        """Take over the headers of a drive's image; return the pages with headers that do not count.

        These are zeroed now, also those of earlier drives. Drives are recovered once each, before anything else.
        `place_generations`: of the drive's superblock; places get greater ones from now on.
        """
        drive = self._drives[index]
        drive.pages_used = pages_used
        headers = find_headers(drive.image[: pages_used * PAGE_BYTES], drive.salt)
        if len(headers.offsets):  # a pool of format 2 has these alone
            place_generations = max(place_generations, int(headers.rows["generation"].max()))
        self._generation = max(self._generation, place_generations)
        adopted = self._adopt(drive, headers)
        rejected = (headers.offsets[~adopted] | np.int64(index << _DRIVE_SHIFT)).tolist()
        rejected += self._keep(index, headers.offsets[adopted], headers.rows[adopted])
        pages: Pages = {}
        for where in rejected:
            at, image = where & ((1 << _DRIVE_SHIFT) - 1), self._drives[where >> _DRIVE_SHIFT].image
            image[at : at + header_bytes(int(pool_fields(image[at:])["num_layers"]))] = 0
            pages.setdefault(where >> _DRIVE_SHIFT, []).append(at // PAGE_BYTES)
        in_use = {page for pages in drive.pages.values() for page in pages.values()}
        drive.free_pages = [page for page in range(drive.geometry.header_pages) if page not in in_use]
        return pages

    def _adopt(self, drive: MappedDrive, headers: FoundHeaders) -> npt.NDArray[np.bool_]:
        """Take slots and header pages; a mark for each header that fits both."""
        rows, marks = headers.rows, np.zeros(len(headers.offsets), dtype=bool)
        if not len(rows):
            return marks
        slots = rows["slab"].astype(np.int64) << 32 | rows["slot"].astype(np.int64)
        order = np.lexsort((rows["revision"], rows["generation"], slots))
        newest = order[np.append(np.diff(slots[order]) != 0, True)]
        slabs = rows["slab"][newest]
        starts = np.flatnonzero(np.append(True, np.diff(slabs) != 0))
        for start, stop in zip(starts.tolist(), [*starts.tolist()[1:], len(newest)], strict=True):
            group = newest[start:stop]
            leader = rows[group[np.argmax(rows["generation"][group])]]
            shape = Shape(int(leader["num_layers"]), int(leader["slice_bytes"]))
            size = header_bytes(shape.num_layers)
            per_page = PAGE_BYTES // size
            slot, at = rows["slot"][group].astype(np.int64), headers.offsets[group]
            fits = (rows["num_layers"][group] == shape.num_layers) & (rows["slice_bytes"][group] == shape.slice_bytes)
            fits &= at % PAGE_BYTES == slot % per_page * size
            adoptable = {"group": group[fits], "slots": slot[fits], "offsets": at[fits]}
            self._adopt_slab(drive, int(leader["slab"]), shape=shape, marks=marks, **adoptable)
        drive.slots.settle()
        return marks

    def _adopt_slab(
        self,
        drive: MappedDrive,
        slab: int,
        shape: Shape,
        group: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        marks: npt.NDArray[np.bool_],
    ) -> None:
        per_page = PAGE_BYTES // header_bytes(shape.num_layers)
        pages: dict[int, int] = {}
        sound = []
        for slot, page, index in zip(slots.tolist(), (offsets // PAGE_BYTES).tolist(), group.tolist(), strict=True):
            if pages.setdefault(slot // per_page, page) == page:
                sound.append((slot, index))
        taken = set(drive.slots.adopt(slab, shape, [slot for slot, _ in sound]))
        if taken:
            drive.pages[slab] = {slot // per_page: pages[slot // per_page] for slot in taken}
            marks[[index for slot, index in sound if slot in taken]] = True

    def _keep(self, index: int, offsets: npt.NDArray[np.int64], rows: npt.NDArray[np.void]) -> list[int]:
        """Enter keys; where two headers have one key the newer counts. Returns where the older ones are."""
        if not len(offsets):
            return []
        raw = np.ascontiguousarray(rows["key"]).tobytes()
        where = (offsets | np.int64(index << _DRIVE_SHIFT)).tolist()
        self._drives[index].current[offsets // UNIT_BYTES] = True
        older = []
        for place, at in zip(where, range(0, len(raw), KEY_BYTES), strict=True):
            key = raw[at : at + KEY_BYTES]
            previous = self._where.get(key)
            newer = previous is None or self._generation_at(place) > self._generation_at(previous)
            if newer:
                self._where.put(key, place)
            if previous is not None:
                older.append(previous if newer else place)
                self._mark(older[-1], current=False)
        for place_ in older:
            drive, at = self._drives[place_ >> _DRIVE_SHIFT], place_ & ((1 << _DRIVE_SHIFT) - 1)
            row = pool_fields(drive.image[at:])
            shape = Shape(int(row["num_layers"]), int(row["slice_bytes"]))
            drive.free([drive.slots.offset_of(int(row["slab"]), int(row["slot"]), shape)])
        return older

    # ----

    def _point(self, key: bytes, where: int) -> None:
        """Let the header there be a key's newest."""
        previous = self._where.get(key)
        if previous is not None:
            self._mark(previous, current=False)
        self._where.put(key, where)
        self._mark(where, current=True)

    def _mark(self, where: int, *, current: bool) -> None:
        self._drives[where >> _DRIVE_SHIFT].current[(where & ((1 << _DRIVE_SHIFT) - 1)) // UNIT_BYTES] = current

    def _generation_of(self, key: bytes, place: DiskPlace) -> int:
        """Return the generation of a header, in the order in which places were allocated.

        A rewritten header keeps its own.
        """
        if allocated := self._allocated.pop((place.drive, place.header), 0):
            return allocated
        key_at = place.header + _KEY_AT
        if self._drives[place.drive].image[key_at : key_at + KEY_BYTES].tobytes() == key:
            return self._generation_at(_where_of(place))
        self._generation += 1
        return self._generation

    def _revision_at(self, key: bytes, place: DiskPlace) -> int:
        """Return the revision of this chunk's header at `place`; -1 if there is none yet."""
        image = self._drives[place.drive].image
        if image[place.header + _KEY_AT : place.header + _KEY_AT + KEY_BYTES].tobytes() != key:
            return -1
        return int(pool_fields(image[place.header :])["revision"])

    def _generation_at(self, where: int | None) -> int:
        """Return the generation of the header there; 0 for none."""
        if where is None:
            return 0
        at = (where & ((1 << _DRIVE_SHIFT) - 1)) + _AGE_AT
        return int(self._drives[where >> _DRIVE_SHIFT].image[at : at + 8].view("<u8")[0])

    def _headers_of(self, index: int) -> npt.NDArray[np.int64]:
        """Return the offsets of the headers of a drive's chunks in its image."""
        return np.flatnonzero(self._drives[index].current) * UNIT_BYTES

    def taken(self) -> set[tuple[int, int]]:
        """Return, for tests, (drive, offset) of every slot in use on a drive that works."""
        working = [(index, drive) for index, drive in enumerate(self._drives) if not drive.failed]
        return {(index, offset) for index, drive in working for offset in drive.slots.taken()}

    def failed_drives(self) -> frozenset[int]:
        """Return the retired drives."""
        return frozenset(index for index, drive in enumerate(self._drives) if drive.failed)

    @property
    def working(self) -> bool:
        """Whether any drive is left."""
        return not all(drive.failed for drive in self._drives)

    def _take(self, index: int, shape: Shape, count: int, size: int) -> list[DiskPlace]:
        """Up to `count` slots of a drive, with room for their headers."""
        drive, places = self._drives[index], []
        stride = drive.slots.layer_stride(shape)
        for offset, header in drive.take(shape, count, size):
            self._generation += 1
            self._allocated[index, header] = self._generation
            places.append(DiskPlace(index, offset, stride, header))
        return places


def _where_of(place: DiskPlace) -> int:
    """Return the number of a header: its drive, and its offset in the drive's image."""
    return place.drive << _DRIVE_SHIFT | place.header
