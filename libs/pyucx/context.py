"""A UCX context and the memory registered with it."""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

from pyucx import _cdef
from pyucx._library import ffi, library, status_text
from pyucx.errors import Closed, InvalidRemoteKey, OperationFailed, TargetOutOfRange

_ucp: Final = library.ucp
_KEY_HEADER: Final = struct.Struct("<4sI")
_KIND_AT: Final = 8
_KINDS: Final = 5
"""Of memory, in a remote key of UCX 1.15 to 1.22: the host's, CUDA's and ROCm's, both also managed."""
_KEY_MAGIC: Final = b"PUK1"
# Without rendezvous UCX uses zero-copy RMA under error mode "peer"; with it, put is emulated at about 1 GB/s.
_DEFAULT_CONFIG: Final = {"RNDV_THRESH": "inf"}


def check(status: int, call: str) -> None:
    """Raise `OperationFailed` for a negative `ucs_status_t`."""
    if status < 0:
        raise OperationFailed(call, status, status_text(status))


class Context:
    """A UCX context: the transports of this process and the memory registered with them.

    `config` are UCX's own settings without their prefix, e.g. `TLS="tcp"`. Use as a context manager, or `close()`.
    """

    def __init__(self, **config: str) -> None:
        settings = ffi.new("ucp_config_t **")
        check(_ucp.ucp_config_read(ffi.NULL, ffi.NULL, settings), "read the UCX configuration")
        try:
            for name, value in (_DEFAULT_CONFIG | config).items():
                check(
                    _ucp.ucp_config_modify(settings[0], name.encode(), value.encode()),
                    f"UCX setting {name}={value}",
                )
            params = ffi.new("ucp_params_t *")
            params.field_mask = 1
            params.features = _cdef.FEATURE_RMA | _cdef.FEATURE_AM | _cdef.FEATURE_WAKEUP
            handle = ffi.new("ucp_context_h *")
            check(_ucp.ucp_init_version(*_cdef_version(), params, settings[0], handle), "create a UCX context")
        finally:
            _ucp.ucp_config_release(settings[0])
        self._handle: Any = handle[0]

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise Closed("the UCX context is closed")
        return self._handle

    def register(self, buffer: Any) -> Memory:
        """Register host or device memory, in place.

        `buffer`: anything writable and contiguous that has the buffer protocol (numpy arrays, mmap, bytearray), or a
        contiguous torch tensor, on the CPU or on a GPU that UCX has a transport for. It is kept alive until `close()`.
        """
        if hasattr(buffer, "data_ptr"):
            if not buffer.is_contiguous():
                raise ValueError("only contiguous tensors can be registered: call .contiguous() first")
            return self.register_pointer(buffer.data_ptr(), buffer.nbytes, keep=buffer)
        view = ffi.from_buffer(buffer, require_writable=True)
        return self.register_pointer(int(ffi.cast("uintptr_t", view)), len(view), keep=(buffer, view))

    def register_pointer(self, address: int, length: int, *, keep: Any = None) -> Memory:
        """Register `length` bytes at `address` (host, or CUDA device memory). `keep` is held until `close()`."""
        if length <= 0:
            raise ValueError(f"cannot register {length} bytes")
        return Memory(self, address, length, keep)

    def close(self) -> None:
        """Give the context back. Workers and memory must be closed before."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            _ucp.ucp_cleanup(handle)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _cdef_version() -> tuple[int, int]:
    # The oldest API whose structures are declared: newer libraries keep accepting it.
    return (1, 13)


class Memory:
    """Memory that is registered, and so can be a source or a target.

    `address` and `length` (bytes) with `remote_key` are needed by a peer to write here or to read from here. Nothing
    at this side checks a peer's access: give the key only to whom you trust with the whole range, and do not `close()`
    or reuse the memory while a peer may still be writing.
    """

    def __init__(self, context: Context, address: int, length: int, keep: Any) -> None:
        params = ffi.new("ucp_mem_map_params_t *")
        params.field_mask = 1 | 2 | 4
        params.address = ffi.cast("void *", address)
        params.length = length
        handle = ffi.new("ucp_mem_h *")
        check(_ucp.ucp_mem_map(context.handle, params, handle), f"register {length} bytes")
        self._context = context
        self._keep = keep
        self._handle: Any = handle[0]
        self.address = address
        self.length = length
        self.remote_key = self._pack()

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise Closed("the registered memory is closed")
        return self._handle

    def pointer(self, offset: int, length: int) -> Any:
        """A `void *` into the memory, after a bounds check."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise TargetOutOfRange(
                f"[{offset}, {offset + length}) is outside of the {self.length} bytes registered here"
            )
        return ffi.cast("void *", self.address + offset)

    def close(self) -> None:
        """Unregister. Safe to call twice."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            _ucp.ucp_mem_unmap(self._context.handle, handle)
            self._keep = None

    def _pack(self) -> bytes:
        buffer, size = ffi.new("void **"), ffi.new("size_t *")
        check(_ucp.ucp_rkey_pack(self._context.handle, self._handle, buffer, size), "pack a remote key")
        raw = bytes(ffi.buffer(buffer[0], size[0]))
        _ucp.ucp_rkey_buffer_release(buffer[0])
        return _KEY_HEADER.pack(_KEY_MAGIC, zlib.crc32(raw)) + raw


def raw_remote_key(packed: bytes) -> bytes:
    """The UCX key inside of a `Memory.remote_key`, verified: UCX itself may crash on a damaged one.

    On a forged one, too, whose checksum is right: it takes the kind of memory in it for an index.
    """
    if len(packed) <= _KEY_HEADER.size:
        raise InvalidRemoteKey(f"a remote key of {len(packed)} bytes is too short")
    magic, checksum = _KEY_HEADER.unpack_from(packed)
    raw = packed[_KEY_HEADER.size :]
    if magic != _KEY_MAGIC or zlib.crc32(raw) != checksum:
        raise InvalidRemoteKey("the remote key is damaged, or was not made by pyucx")
    if len(raw) <= _KIND_AT or raw[_KIND_AT] >= _KINDS:
        raise InvalidRemoteKey("the remote key is of no kind of memory that there is")
    return raw
