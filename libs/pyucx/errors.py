"""Errors of pyucx.

UcxError
├── LibraryNotFound          no usable libucp on this machine (also an ImportError)
├── InvalidRemoteKey         the packed key is truncated, damaged or of another transport
├── TargetOutOfRange         a transfer would leave the memory that either side registered (also a ValueError)
├── MessageTooLong           an active message over MESSAGE_BYTES_MAX (also a ValueError)
├── Closed                   the object was closed before the call
├── OperationTimeout         no completion in time; the transfer may still be in flight (also a TimeoutError)
└── OperationFailed          UCX completed an operation with an error status
    └── PeerDied             the peer's process or its link has failed (also a ConnectionError)
"""

from __future__ import annotations


class UcxError(Exception):
    """Base of every error that this package raises."""


class LibraryNotFound(UcxError, ImportError):
    """No usable libucp was found when `pyucx` was imported; the message lists the libraries that were tried."""


class InvalidRemoteKey(UcxError):
    """A packed remote key cannot be used: truncated, damaged, or of a transport that is not there."""


class TargetOutOfRange(UcxError, ValueError):
    """A transfer would leave registered memory. UCX itself checks nothing at the target."""


class MessageTooLong(UcxError, ValueError):
    """An active message is longer than `MESSAGE_BYTES_MAX`."""


class Closed(UcxError):
    """The context, worker, endpoint or stream was closed before the call."""


class OperationTimeout(UcxError, TimeoutError):
    """No completion in time. Until the endpoint is closed by force the memory may still be touched."""


class OperationFailed(UcxError):
    """UCX completed an operation with an error status.

    `status` is the `ucs_status_t` (negative).
    """

    def __init__(self, operation: str, status: int, reason: str) -> None:
        super().__init__(f"{operation}: {reason} ({status})")
        self.what = operation
        self.status = status
        self.reason = reason


class PeerDied(OperationFailed, ConnectionError):
    """The peer's process or its link has failed; the endpoint cannot be used any longer."""
