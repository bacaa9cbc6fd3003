"""A UCX worker that makes progress inside the running asyncio loop.

UCX makes no progress of its own: here the loop calls `ucp_worker_progress`. While operations are outstanding (or
messages are expected), progress runs in ticks of at most 200 µs by `call_soon`, so that other tasks of the loop keep
running; after 100 µs without an event the worker is armed and sleeps on its file descriptor. An idle worker costs
nothing, and no second thread fights for the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from pyucx import _cdef
from pyucx._library import ffi, library, pointer_status
from pyucx.context import Context, check
from pyucx.endpoint import GREETING_ID, Endpoint
from pyucx.errors import Closed

_log: Final = logging.getLogger("pyucx")
_ucp: Final = library.ucp
_progress: Final = library.ucp.ucp_worker_progress
_request_free: Final = library.ucp.ucp_request_free
_TICK_BUDGET_NS: Final = 200_000
_SPIN_NS: Final = 100_000

MessageHandler = Callable[[bytes], None]
Completion = Callable[[int], None]


class Worker:
    """Progress, addresses and active messages of one loop. Use from the thread of that loop only.

    `async with Worker(context) as worker`, or `start()` and `close()`.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._handle: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._completions: dict[int, Completion] = {}
        self._next_operation = 1
        self._handlers: dict[int, MessageHandler] = {}
        self._endpoints: dict[int, Endpoint] = {}
        self._expecting = 0
        self._scheduled = False
        self._last_event_ns = 0

    async def __aenter__(self) -> Worker:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def context(self) -> Context:
        return self._context

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise Closed("the UCX worker is not running")
        return self._handle

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise Closed("the UCX worker is not running")
        return self._loop

    @property
    def outstanding(self) -> int:
        """Operations posted and not yet completed."""
        return len(self._completions)

    def start(self) -> None:
        """Create the UCX worker and attach it to the running loop."""
        self._loop = asyncio.get_running_loop()
        params = ffi.new("ucp_worker_params_t *")
        params.field_mask = 1
        params.thread_mode = _cdef.THREAD_MODE_SINGLE
        handle = ffi.new("ucp_worker_h *")
        check(_ucp.ucp_worker_create(self._context.handle, params, handle), "create a UCX worker")
        self._handle = handle[0]
        self._make_callbacks()
        descriptor = ffi.new("int *")
        check(_ucp.ucp_worker_get_efd(self._handle, descriptor), "get the worker's event descriptor")
        self._descriptor = int(descriptor[0])
        self._loop.add_reader(self._descriptor, self.kick)
        self.on_message(GREETING_ID, lambda _: None)
        self.kick()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Close every endpoint by force, let outstanding operations end, destroy the worker."""
        if self._handle is None:
            return
        for endpoint in list(self._endpoints.values()):
            endpoint.abort()
        deadline = time.monotonic() + timeout_s
        while self._completions and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
            self.kick()
        self.loop.remove_reader(self._descriptor)
        handle, self._handle = self._handle, None
        _ucp.ucp_worker_destroy(handle)

    def address(self) -> bytes:
        """Address that a peer needs to connect to this worker."""
        address, length = ffi.new("ucp_address_t **"), ffi.new("size_t *")
        check(_ucp.ucp_worker_get_address(self.handle, address, length), "get the worker's address")
        try:
            return bytes(ffi.buffer(address[0], length[0]))
        finally:
            _ucp.ucp_worker_release_address(self._handle, address[0])

    def connect(self, address: bytes) -> Endpoint:
        """An endpoint to the worker that has `address`. A peer that has died is reported here or at the first wait."""
        return Endpoint(self, address)

    def on_message(self, message_id: int, handler: MessageHandler) -> None:
        """Call `handler(message)` for each active message with `message_id` (above 0), in the loop's thread."""
        self._handlers[message_id] = handler
        params = ffi.new("ucp_am_handler_param_t *")
        params.field_mask = 1 | 2 | 4 | 8
        params.id = message_id
        params.flags = _cdef.AM_WHOLE_MESSAGE
        params.cb = self._message_callback
        params.arg = ffi.cast("void *", message_id)
        check(
            _ucp.ucp_worker_set_am_recv_handler(self.handle, params),
            f"install the handler of message {message_id}",
        )

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """While inside, the worker spins a little before it sleeps: lower latency for messages about to arrive."""
        self._expecting += 1
        self.kick()
        try:
            yield
        finally:
            self._expecting -= 1

    # What endpoints and streams use.

    def post(self, call: Callable[[Any], Any], completion: Completion, *, keep: Any = None) -> None:
        """Run `call(request_params)`; `completion(status)` runs once, now or from a later tick.

        `keep` stays referenced until then.
        """
        operation = self._next_operation
        self._next_operation += 1
        if keep is None:
            self._completions[operation] = completion
        else:
            self._completions[operation] = lambda status, keep=keep: completion(status)  # type: ignore[misc]
        params = self._params
        params.op_attr_mask = _cdef.OP_FIELD_CALLBACK | _cdef.OP_FIELD_USER_DATA
        params.user_data = ffi.cast("void *", operation)
        status = pointer_status(call(params))
        if status <= 0:  # ended at once: UCX runs no callback
            del self._completions[operation]
            completion(status)
        self.kick()

    def attach(self, endpoint: Endpoint, handle: Any) -> None:
        self._endpoints[int(ffi.cast("uintptr_t", handle))] = endpoint

    def detach(self, handle: Any) -> None:
        """The connection's handle is closed: its errors are ignored from now on."""
        self._endpoints.pop(int(ffi.cast("uintptr_t", handle)), None)

    @property
    def error_callback(self) -> Any:
        return self._error_callback

    def kick(self) -> None:
        """See to it that progress runs soon."""
        if not self._scheduled and self._handle is not None:
            self._scheduled = True
            self._last_event_ns = time.monotonic_ns()
            self.loop.call_soon(self._tick)

    def _tick(self) -> None:
        """Make one slice of progress, then: again in the next iteration of the loop, or arm and sleep."""
        handle = self._handle
        if handle is None:
            return
        clock_ns = time.monotonic_ns
        end, events = clock_ns() + _TICK_BUDGET_NS, 0
        while _progress(handle):
            events += 1
            if clock_ns() >= end:
                break
        busy = bool(events)
        if busy:
            self._last_event_ns = clock_ns()
        elif self._completions or self._expecting:
            busy = clock_ns() - self._last_event_ns < _SPIN_NS
        if busy or _ucp.ucp_worker_arm(handle) == _cdef.STATUS_BUSY:
            self.loop.call_soon(self._tick)
        else:
            self._scheduled = False

    def _make_callbacks(self) -> None:
        # References to self would form a cycle through C that no collector sees: the callbacks hold the tables only.
        completions, handlers, endpoints = self._completions, self._handlers, self._endpoints
        as_int = "uintptr_t"

        @ffi.callback("void(void *, ucs_status_t, void *)")  # type: ignore[untyped-decorator, unused-ignore]
        def completed(request: Any, status: int, operation: Any) -> None:
            _request_free(request)
            completion = completions.pop(int(ffi.cast(as_int, operation)), None)
            if completion is not None:
                _guarded(completion, status)

        @ffi.callback("void(void *, ucp_ep_h, ucs_status_t)")  # type: ignore[untyped-decorator, unused-ignore]
        def failed(_: Any, endpoint: Any, status: int) -> None:
            reference = endpoints.get(int(ffi.cast(as_int, endpoint)))
            if reference is not None:
                _guarded(reference.fail, status)

        @ffi.callback(  # type: ignore[untyped-decorator, unused-ignore]
            "ucs_status_t(void *, const void *, size_t, void *, size_t, const ucp_am_recv_param_t *)"
        )
        def received(message_id: Any, header: Any, length: int, _data: Any, _length: int, _params: Any) -> int:
            handler = handlers.get(int(ffi.cast(as_int, message_id)))
            if handler is not None:
                _guarded(handler, bytes(ffi.buffer(header, length)))
            return 0

        self._completed, self._error_callback, self._message_callback = completed, failed, received
        self._params = ffi.new("ucp_request_param_t *")
        self._params.cb = ffi.cast("void *", completed)


def _guarded(function: Callable[[Any], None], argument: Any) -> None:
    """An exception must not travel into C, where it would only be printed: log it with its context."""
    try:
        function(argument)
    except Exception:
        _log.exception("a UCX callback raised")
