"""A connection to one peer: one-sided writes and reads of its memory, and short active messages.

Everything runs under error mode "peer", the only one in which a killed peer does not take this process down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from pyucx import _cdef
from pyucx._library import ffi, library, status_text
from pyucx.context import Memory, check, raw_remote_key
from pyucx.errors import (
    Closed,
    InvalidRemoteKey,
    MessageTooLong,
    OperationFailed,
    OperationTimeout,
    PeerDied,
    TargetOutOfRange,
)
from pyucx.gather import GatherTable
from pyucx.stream import Stream

if TYPE_CHECKING:
    from pyucx.worker import Worker

_ucp: Final = library.ucp
MESSAGE_BYTES_MAX: Final = 1024
GREETING_ID: Final = 0
"""Active message that every endpoint begins with; every worker ignores it."""
TIMEOUT_S: Final = 30.0
_BEHIND_KEY: Final = bytes(64 * 256)
"""UCX goes by the lengths that a remote key says, 255 bytes for each of 64 devices: a forged one ends in here."""


class RemoteMemory:
    """A peer's registered range, as this side may write or read it. Made by `Endpoint.remote_memory`.

    Every access is checked against `length` here, because nothing checks it at the peer.
    """

    def __init__(self, handle: Any, address: int, length: int) -> None:
        self._handle = handle
        self.address = address
        self.length = length

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise Closed("the remote memory is closed")
        return self._handle

    def at(self, offset: int, length: int) -> int:
        """The peer's address of [offset, offset + length), after a bounds check."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise TargetOutOfRange(f"[{offset}, {offset + length}) is outside of the peer's {self.length} bytes")
        return self.address + offset

    def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            _ucp.ucp_rkey_destroy(handle)


class Endpoint:
    """Connection to one peer, made by `Worker.connect`; every method belongs to the worker's loop.

    Cancelling an awaited operation abandons the wait, not the transfer: memory stays in use until the operation ends
    or `abort()` has run.
    """

    def __init__(self, worker: Worker, address: bytes) -> None:
        self._worker = worker
        self._error: PeerDied | None = None
        self._failure_callbacks: dict[object, Callable[[PeerDied], None]] = {}
        self._transfers = 0
        self.reached = False
        """Whether UCX has ever got through to the peer. A connection that fails before says nothing of the peer."""
        packed = ffi.from_buffer(address)
        params = ffi.new("ucp_ep_params_t *")
        params.field_mask = 1 | 2 | 4
        params.address = ffi.cast("ucp_address_t *", packed)
        params.err_mode = _cdef.ERROR_MODE_PEER
        params.err_handler.cb = worker.error_callback
        handle = ffi.new("ucp_ep_h *")
        check(_ucp.ucp_ep_create(worker.handle, params, handle), "create an endpoint")
        self._handle: Any = handle[0]
        worker.attach(self, self._handle)
        # A message opens the connection before anything else does. Over tcp a put as the very first thing on a new
        # connection was seen to crash its target (UCX 1.22, no rx buffer in uct_tcp_ep_progress_put_rx: one run in
        # four); behind a message, in none of forty. It also makes either side notice the other's death from now on.
        self.send(GREETING_ID, b"")
        self.post_flush(self._greeted)

    @property
    def worker(self) -> Worker:
        return self._worker

    @property
    def error(self) -> PeerDied | None:
        """Set once the peer is known to be gone."""
        return self._error

    @property
    def handle(self) -> Any:
        if self._error is not None:
            raise self._error
        if self._handle is None:
            raise Closed("the endpoint is closed")
        return self._handle

    def on_failure(self, callback: Callable[[PeerDied], None]) -> Callable[[], None]:
        """Call `callback(error)` once when the peer is found dead (at once if it is already).

        Returns a function that takes the callback back; call it when the waiter is done.
        """
        if self._error is not None:
            callback(self._error)
            return lambda: None
        token = object()
        self._failure_callbacks[token] = callback
        return lambda: self._failure_callbacks.pop(token, None) and None

    def fail(self, status: int) -> None:
        """Mark the endpoint as failed; the worker calls this from UCX's error handler."""
        if self._error is None:
            self._error = PeerDied("endpoint", status, status_text(status))
            callbacks, self._failure_callbacks = self._failure_callbacks, {}
            for callback in callbacks.values():
                callback(self._error)

    def remote_memory(self, address: int, length: int, remote_key: bytes) -> RemoteMemory:
        """The peer's range [address, address + length), opened with its `Memory.remote_key`.

        Raises `InvalidRemoteKey` for a truncated, damaged or unusable key.
        """
        raw = ffi.from_buffer(raw_remote_key(remote_key) + _BEHIND_KEY)
        handle = ffi.new("ucp_rkey_h *")
        status = _ucp.ucp_ep_rkey_unpack(self.handle, raw, handle)
        if status < 0:
            raise InvalidRemoteKey(f"UCX cannot use the remote key: {status_text(status)}")
        return RemoteMemory(handle[0], address, length)

    async def put(
        self,
        source: Memory,
        offset: int,
        length: int,
        remote: RemoteMemory,
        remote_offset: int,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Write `length` bytes and wait until the source may be reused. Readable at the peer only after `flush()`."""
        done = self.future("put")
        self.post_put(source, offset, length, remote, remote_offset, done.settle)
        await done.wait(timeout_s)

    async def put_gathered(
        self,
        source: Memory,
        offsets: npt.NDArray[np.int64],
        length: int,
        remote: RemoteMemory,
        remote_offset: int,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Write `length` bytes from each of `offsets`, back to back, in one operation."""
        done = self.future("put")
        table = GatherTable(source, offsets, length)
        self.post_put_gathered(table, 0, len(offsets), remote, remote_offset, done.settle)
        await done.wait(timeout_s)

    async def get(
        self,
        target: Memory,
        offset: int,
        length: int,
        remote: RemoteMemory,
        remote_offset: int,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Read `length` bytes of the peer's memory; when this returns they are here."""
        done = self.future("get")
        pointer, address = target.pointer(offset, length), remote.at(remote_offset, length)
        handle = self.handle

        def call(params: Any) -> Any:
            _use_memory(params, target)
            return _ucp.ucp_get_nbx(handle, pointer, length, address, remote.handle, params)

        self._transfer(call, done.settle)
        await done.wait(timeout_s)

    async def flush(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until all that was posted here is complete at the peer."""
        done = self.future("flush")
        self.post_flush(done.settle)
        await done.wait(timeout_s)

    def send(self, message_id: int, message: bytes) -> None:
        """Send a short active message; at most `MESSAGE_BYTES_MAX` bytes. Ordered among messages, not after puts."""
        if len(message) > MESSAGE_BYTES_MAX:
            raise MessageTooLong(f"{len(message)} bytes in an active message, {MESSAGE_BYTES_MAX} at most")
        handle, header = self.handle, ffi.from_buffer(message)
        flags = _cdef.AM_SEND_EAGER | (_cdef.AM_SEND_COPY_HEADER if library.copies_headers else 0)

        def call(params: Any) -> Any:
            params.op_attr_mask |= _cdef.OP_FIELD_FLAGS
            params.flags = flags
            return _ucp.ucp_am_send_nbx(handle, message_id, header, len(message), ffi.NULL, 0, params)

        self._worker.post(call, self._message_sent, keep=(message, header))

    def stream(
        self,
        source: Memory,
        remote: RemoteMemory,
        message_id: int,
        *,
        window_bytes: int = 4 << 20,
        slice_bytes: int = 1 << 20,
    ) -> Stream:
        """Ordered payloads into `remote`, each announced by a message once it is complete there. See `Stream`."""
        return Stream(self, source, remote, message_id, window_bytes=window_bytes, slice_bytes=slice_bytes)

    def transports(self) -> list[tuple[str, str]]:
        """(transport, device) of each lane, e.g. ("cma", "memory"). Empty before UCX 1.14, which cannot tell."""
        attributes = ffi.new("ucp_ep_attr_t *")
        entries = ffi.new("ucp_transport_entry_t[16]")
        attributes.field_mask = 1 << 3
        attributes.transports.entries = entries
        attributes.transports.num_entries = 16
        attributes.transports.entry_size = ffi.sizeof("ucp_transport_entry_t")
        check(_ucp.ucp_ep_query(self.handle, attributes), "query the endpoint")
        if entries[0].transport_name == ffi.NULL:
            return []
        return [
            (_text(entries[i].transport_name), _text(entries[i].device_name))
            for i in range(attributes.transports.num_entries)
        ]

    async def settle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until no put or get of this endpoint is in flight, also of calls that timed out or were cancelled.

        After `abort()` this says when local memory is free of UCX. Raises `OperationTimeout`.
        """
        deadline = time.monotonic() + timeout_s
        while self._transfers:
            if time.monotonic() > deadline:
                raise OperationTimeout(f"{self._transfers} transfers in flight after {timeout_s} s")
            self._worker.kick()
            await asyncio.sleep(0.001)

    async def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Flush posted operations, notify the peer, and disconnect. A disconnected peer is no error here."""
        if self._handle is None:
            return
        if self._error is not None:
            self.abort()
            return
        done = self.future("close")
        self._close(0, done.settle)
        try:
            await done.wait(timeout_s)
        except OperationFailed:
            return  # the connection is gone either way

    def abort(self) -> None:
        """Disconnect now; operations in flight end with an error, and the endpoint counts as failed."""
        if self._handle is not None:
            self._close(_cdef.CLOSE_FORCE, lambda status: None)
            self.fail(_cdef.STATUS_CANCELED)

    # The verbs without a wait, for streams.

    def post_put(
        self,
        source: Memory,
        offset: int,
        length: int,
        remote: RemoteMemory,
        remote_offset: int,
        completion: Callable[[int], None],
    ) -> None:
        """Begin to write `length` bytes of local memory; `completion` is called with UCX's status, also at once."""
        pointer, address = source.pointer(offset, length), remote.at(remote_offset, length)
        handle = self.handle

        def call(params: Any) -> Any:
            _use_memory(params, source)
            return _ucp.ucp_put_nbx(handle, pointer, length, address, remote.handle, params)

        self._transfer(call, completion)

    def post_put_gathered(
        self,
        table: GatherTable,
        start: int,
        count: int,
        remote: RemoteMemory,
        remote_offset: int,
        completion: Callable[[int], None],
    ) -> None:
        """The same for `count` entries of a table, which land one behind the other."""
        address, handle, entries = remote.at(remote_offset, count * table.length), self.handle, table.at(start)

        def call(params: Any) -> Any:
            params.op_attr_mask |= _cdef.OP_FIELD_DATATYPE
            params.datatype = _cdef.DATATYPE_IOV
            return _ucp.ucp_put_nbx(handle, entries, count, address, remote.handle, params)

        self._transfer(call, completion, table)

    def post_flush(self, completion: Callable[[int], None]) -> None:
        """Call `completion` when all that was posted before has arrived."""
        handle = self.handle
        self._worker.post(lambda params: _ucp.ucp_ep_flush_nbx(handle, params), completion)

    def _transfer(self, call: Callable[[Any], Any], completion: Callable[[int], None], keep: object = None) -> None:
        """Post a put or get, and count it until it ends."""

        def ended(status: int) -> None:
            self._transfers -= 1
            self.reached |= status >= 0
            completion(status)

        self._transfers += 1
        self._worker.post(call, ended, keep=keep)

    def future(self, operation: str) -> Outcome:
        """Result of a posted operation, to await. `operation`: its name, for the error."""
        return Outcome(self, operation)

    def _greeted(self, status: int) -> None:
        self.reached |= status >= 0

    def _message_sent(self, status: int) -> None:
        if status < 0:
            self.fail(status)

    def _close(self, flags: int, completion: Callable[[int], None]) -> None:
        handle, self._handle = self._handle, None
        self._worker.detach(handle)

        def call(params: Any) -> Any:
            if flags:
                params.op_attr_mask |= _cdef.OP_FIELD_FLAGS
                params.flags = flags
            return _ucp.ucp_ep_close_nbx(handle, params)

        self._worker.post(call, completion)


class Outcome:
    """A completion that can be awaited."""

    def __init__(self, endpoint: Endpoint, operation: str) -> None:
        self._endpoint = endpoint
        self._what = operation
        self._future: asyncio.Future[int] = endpoint.worker.loop.create_future()

    def settle(self, status: int) -> None:
        if not self._future.done():
            self._future.set_result(status)

    async def wait(self, timeout_s: float) -> None:
        """Wait for the end. Raises `OperationTimeout`, `PeerDied` or `OperationFailed`."""
        try:
            async with asyncio.timeout(timeout_s):
                status = await self._future
        except TimeoutError:
            raise OperationTimeout(f"{self._what}: no completion within {timeout_s} s") from None
        if status < 0:
            kind = PeerDied if self._endpoint.error is not None else OperationFailed
            raise kind(self._what, status, status_text(status))


def _use_memory(params: Any, memory: Memory) -> None:
    if library.takes_memory_handles:
        params.op_attr_mask |= _cdef.OP_FIELD_MEMORY_HANDLE
        params.memh = memory.handle


def _text(value: Any) -> str:
    text = ffi.string(value)
    return text.decode() if isinstance(text, bytes) else str(text)
