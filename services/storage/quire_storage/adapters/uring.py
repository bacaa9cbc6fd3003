"""The `BlockIO` port on io_uring, through the kernel's own interface: three system calls and two shared rings.

Neither of the usual wrappers fits: the `liburing` package wants Linux 6.14, and both it and liburing itself fill one
submission entry per call. Here the entries of an IOCB are one numpy array, copied into the ring as a block, so the
work in Python does not grow with the number of slices. Runs from Linux 5.6 on.

Order of memory: the kernel reads the submission ring inside of `io_uring_enter`, a system call of this same thread.
Completions are read after the eventfd woke us, again behind a system call.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from cffi import FFI

from quire.model.iocb import CONTEXTS_MAX, Iocb, Op
from quire_storage.errors import BlockIOUnavailable

_ffi: Final = FFI()
_ffi.cdef("long syscall(long number, ...);")
_libc: Final = _ffi.dlopen(None)
_SETUP, _ENTER, _REGISTER = 425, 426, 427
_REGISTER_BUFFERS, _REGISTER_FILES, _REGISTER_EVENTFD = 0, 2, 4
_SETUP_CQSIZE, _FEATURE_SINGLE_MMAP = 1 << 3, 1
_OFFSET_RINGS, _OFFSET_SQES = 0, 0x10000000
_FSYNC, _READ_FIXED, _WRITE_FIXED, _READ, _WRITE = 3, 4, 5, 22, 23
_FIXED_FILE, _ASYNC = 1, 1 << 4
_DATASYNC = 1
_REGISTERED_BYTES_MAX = 1 << 30
_SQ_ENTRIES = 4096
_RETRY: Final = (-errno.EAGAIN, -errno.EINTR)

_SQE: Final = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "<u2"),
        ("fd", "<i4"),
        ("off", "<u8"),
        ("addr", "<u8"),
        ("len", "<u4"),
        ("op_flags", "<u4"),
        ("user_data", "<u8"),
        ("buf_index", "<u2"),
        ("rest", "V22"),
    ]
)
_CQE: Final = np.dtype([("user_data", "<u8"), ("res", "<i4"), ("flags", "<u4")])
_PARAMS: Final = np.dtype(
    [
        ("sq_entries", "<u4"),
        ("cq_entries", "<u4"),
        ("flags", "<u4"),
        ("sq_thread", "<u4", 2),
        ("features", "<u4"),
        ("wq_fd", "<u4"),
        ("resv", "<u4", 3),
        ("sq_off", "<u4", 10),  # head, tail, ring_mask, ring_entries, flags, dropped, array, …
        ("cq_off", "<u4", 10),  # head, tail, ring_mask, ring_entries, overflow, cqes, …
    ]
)


@dataclass(slots=True)
class _Running:
    """An IOCB on its way: its submission entries, how many were submitted, how many are not complete."""

    iocb: Iocb
    entries: npt.NDArray[np.void]
    submitted: int
    left: int
    moved: npt.NDArray[np.int64]


class UringBlockIO:
    """At most `depth` contexts are with the kernel at a time; the rest of an IOCB follows as they complete."""

    name = "io_uring"

    def __init__(self, depth: int, *, direct: bool) -> None:
        self._depth = depth
        self._direct = direct
        self._ring = -1
        self.event_fd = -1
        self._slots: list[_Running | None] = []
        self._waiting: deque[int] = deque()
        self._again: deque[tuple[int, int]] = deque()
        self._in_flight = 0
        self._done: list[Iocb] = []

    def init_queue(self, files: Sequence[int], memories: Sequence[npt.NDArray[np.uint8]]) -> None:
        params = np.zeros(1, dtype=_PARAMS)
        params["flags"] = _SETUP_CQSIZE
        params["cq_entries"] = 2 * _SQ_ENTRIES
        try:
            self._ring = _call(_SETUP, _ffi.cast("unsigned", _SQ_ENTRIES), _pointer(params))
        except OSError as error:
            hint = " (a container's seccomp profile forbids it?)" if error.errno == errno.EPERM else ""
            raise BlockIOUnavailable(f"io_uring: {error.strerror}{hint}") from None
        if not int(params["features"][0]) & _FEATURE_SINGLE_MMAP:
            raise BlockIOUnavailable("io_uring: this kernel is older than 5.6")
        self._map(params[0])
        self._register_files(files)
        self._register_memories(memories)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        event = np.array([self.event_fd], dtype=np.int32)
        self._register(_REGISTER_EVENTFD, event, 1)

    @property
    def description(self) -> str:
        buffers = "registered" if len(self._starts) else "plain"
        return f"io_uring, {'direct' if self._direct else 'buffered'}, registered files, {buffers} buffers"

    def get_iocb(self) -> Iocb:
        return Iocb()

    def issue_io(self, iocb: Iocb) -> None:
        slot = self._free_slot()
        self._slots[slot] = _Running(
            iocb, self._entries(iocb, slot), 0, len(iocb.contexts), np.zeros(len(iocb.contexts), np.int64)
        )
        self._waiting.append(slot)
        self._feed()

    def wait_cqe(self) -> list[Iocb]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)
        self._reap()
        self._feed()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        if self._ring >= 0:
            del self._sqes, self._cqes, self._words  # they keep the rings mapped
            os.close(self._ring)
            os.close(self.event_fd)
            self._ring = -1

    # ---- submission

    def _entries(self, iocb: Iocb, slot: int) -> npt.NDArray[np.void]:
        contexts = iocb.contexts
        entries = np.zeros(len(contexts), dtype=_SQE)
        entries["flags"] = _FIXED_FILE if self._direct or iocb.op is Op.SYNC else _FIXED_FILE | _ASYNC
        entries["fd"] = contexts.files
        entries["user_data"] = (slot << 16) + np.arange(len(contexts))
        if iocb.op is Op.SYNC:
            entries["opcode"], entries["op_flags"] = _FSYNC, _DATASYNC
            return entries
        entries["off"] = contexts.offsets
        entries["addr"] = contexts.addresses
        entries["len"] = contexts.lengths
        fixed = self._buffer_indices(contexts.addresses, contexts.lengths)
        is_read = iocb.op is Op.READ
        if fixed is None:
            entries["opcode"] = _READ if is_read else _WRITE
        else:
            entries["opcode"] = _READ_FIXED if is_read else _WRITE_FIXED
            entries["buf_index"] = fixed
        return entries

    def _feed(self) -> None:
        """Give the kernel as much as the depth allows, in one system call."""
        tail, count = int(self._words[self._sq_tail]), 0
        while self._in_flight + count < self._depth and (self._again or self._waiting):
            room = min(self._depth - self._in_flight - count, _SQ_ENTRIES - count)
            if room <= 0:
                break
            block = self._next_entries(room)
            places = (tail + count + np.arange(len(block))) & (_SQ_ENTRIES - 1)
            self._sqes[places] = block
            count += len(block)
        if count:
            self._words[self._sq_tail] = np.uint32((tail + count) & 0xFFFFFFFF)
            self._in_flight += count
            self._enter(count)

    def _next_entries(self, room: int) -> npt.NDArray[np.void]:
        if self._again:
            slot, index = self._again.popleft()
            running = self._slots[slot]
            assert running is not None, "a slot is free only when all its contexts are complete"
            return running.entries[index : index + 1]
        running = self._slots[self._waiting[0]]
        assert running is not None, "a slot is free only when all its contexts are complete"
        block = running.entries[running.submitted : running.submitted + room]
        running.submitted += len(block)
        if running.submitted == len(running.entries):
            self._waiting.popleft()
        return block

    def _enter(self, count: int) -> None:
        while count:
            try:
                count -= _call(_ENTER, *_unsigned(self._ring, count, 0, 0), _ffi.NULL, _ffi.cast("size_t", 0))
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EINTR, errno.EBUSY):
                    raise
                self._reap()

    # ---- completion

    def _reap(self) -> None:
        head, tail = int(self._words[self._cq_head]), int(self._words[self._cq_tail])
        count = (tail - head) & 0xFFFFFFFF
        if not count:
            return
        rows = self._cqes[(head + np.arange(count)) & self._cq_mask]
        self._words[self._cq_head] = np.uint32(tail)
        self._in_flight -= count
        slots, indices = (rows["user_data"] >> 16).astype(np.int64), (rows["user_data"] & 0xFFFF).astype(np.int64)
        for slot in np.unique(slots).tolist():
            is_of_slot = slots == slot
            self._complete(slot, indices[is_of_slot], rows["res"][is_of_slot].astype(np.int64))

    def _complete(self, slot: int, indices: npt.NDArray[np.int64], results: npt.NDArray[np.int64]) -> None:
        running = self._slots[slot]
        assert running is not None, "the kernel completes each context once"
        lengths = running.iocb.contexts.lengths
        finished = running.moved[indices] + results == lengths[indices]
        running.iocb.results[indices[finished]] = lengths[indices[finished]]
        running.left -= int(finished.sum())
        for index, result in zip(indices[~finished].tolist(), results[~finished].tolist(), strict=True):
            self._unfinished(slot, running, index, result)
        if running.left == 0:
            self._slots[slot] = None
            self._done.append(running.iocb)

    def _unfinished(self, slot: int, running: _Running, index: int, result: int) -> None:
        """A context that moved less than its bytes: the rest again, unless there is no more to be had."""
        if result > 0:
            running.moved[index] += result
            entry = running.entries[index : index + 1]
            entry["off"] += np.uint64(result)
            entry["addr"] += np.uint64(result)
            entry["len"] -= np.uint32(result)
        if result > 0 or result in _RETRY:
            self._again.append((slot, index))
            return
        running.iocb.results[index] = result if result < 0 else running.moved[index]
        running.left -= 1

    # ---- set-up

    def _free_slot(self) -> int:
        for slot, running in enumerate(self._slots):
            if running is None:
                return slot
        self._slots.append(None)
        return len(self._slots) - 1

    def _map(self, params: np.void) -> None:
        sq_off, cq_off = params["sq_off"].tolist(), params["cq_off"].tolist()
        cq_entries = int(params["cq_entries"])
        size = max(sq_off[6] + 4 * _SQ_ENTRIES, cq_off[5] + cq_entries * _CQE.itemsize)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        rings = mmap.mmap(self._ring, size, flags=flags, offset=_OFFSET_RINGS)
        sqes = mmap.mmap(self._ring, _SQ_ENTRIES * _SQE.itemsize, flags=flags, offset=_OFFSET_SQES)
        self._words = np.frombuffer(rings, dtype=np.uint32, count=size // 4)
        self._sqes = np.frombuffer(sqes, dtype=_SQE)
        self._cqes = np.frombuffer(rings, dtype=_CQE, count=cq_entries, offset=cq_off[5])
        self._sq_tail, self._cq_head, self._cq_tail = sq_off[1] // 4, cq_off[0] // 4, cq_off[1] // 4
        self._cq_mask = cq_entries - 1
        array = sq_off[6] // 4
        self._words[array : array + _SQ_ENTRIES] = np.arange(_SQ_ENTRIES, dtype=np.uint32)

    def _register(self, operation: int, argument: npt.NDArray[np.generic], count: int) -> None:
        number, length = _ffi.cast("unsigned", operation), _ffi.cast("unsigned", count)
        _call(_REGISTER, _ffi.cast("unsigned", self._ring), number, _pointer(argument), length)

    def _register_files(self, files: Sequence[int]) -> None:
        self._register(_REGISTER_FILES, np.array(files, dtype=np.int32), len(files))

    def _register_memories(self, memories: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Pin the memory once, instead of at each read. Limits on locked memory may forbid it: then without."""
        vectors = [
            (int(memory.ctypes.data) + at, min(_REGISTERED_BYTES_MAX, memory.nbytes - at))
            for memory in memories
            for at in range(0, memory.nbytes, _REGISTERED_BYTES_MAX)
        ]
        table = np.array(sorted(vectors), dtype=np.uint64).reshape(-1, 2)
        try:
            self._register(_REGISTER_BUFFERS, table, len(table))
        except OSError:
            table = table[:0]
        self._starts = table[:, 0].astype(np.int64)
        self._ends = self._starts + table[:, 1].astype(np.int64)

    def _buffer_indices(
        self, addresses: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64] | None:
        """Return the registered buffer of each context; None unless each is within one."""
        if not len(self._starts):
            return None
        indices = np.searchsorted(self._starts, addresses, side="right") - 1
        if int(indices.min()) < 0 or np.any(addresses + lengths > self._ends[indices]):
            return None
        return indices


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(_ffi.errno, os.strerror(_ffi.errno))
    return result


def _unsigned(*values: int) -> list[object]:
    return [_ffi.cast("unsigned", value) for value in values]


def _pointer(array: npt.NDArray[np.generic]) -> object:
    return _ffi.cast("void *", array.ctypes.data)


assert _SQE.itemsize == 64 and _CQE.itemsize == 16 and _PARAMS.itemsize == 120 and CONTEXTS_MAX < 1 << 16
