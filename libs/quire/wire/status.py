"""The one table between Quire's errors and gRPC's status codes, and the way errors travel in trailing metadata."""

from __future__ import annotations

from typing import Any, Final

import grpc

from quire.model import errors

_CODE_KEY: Final = "quire-error"
_FIELD_KEY: Final = "quire-error-field"
_RETRY_KEY: Final = "retry-after-ms"
_UNSENT_KEY: Final = "quire-unsent"
_NOT_CONNECTED: Final = "failed to connect to all addresses"
"""How gRPC begins where it had no connection to send a call on."""

# The most specific class that is listed decides.
_STATUS: Final[dict[type[errors.QuireError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    errors.LeaseForged: grpc.StatusCode.PERMISSION_DENIED,
    errors.LeaseExpired: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ChunkMissing: grpc.StatusCode.NOT_FOUND,
    errors.ImageMissing: grpc.StatusCode.NOT_FOUND,
    errors.ContentConflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.ConditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NameTaken: grpc.StatusCode.ALREADY_EXISTS,
    errors.CorruptData: grpc.StatusCode.DATA_LOSS,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Abandoned: grpc.StatusCode.CANCELLED,
    errors.NotImplementedHere: grpc.StatusCode.UNIMPLEMENTED,
    errors.VersionUnsupported: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigInvalid: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}


def status_of(error: errors.QuireError) -> grpc.StatusCode:
    """Return the gRPC status of an error, by its nearest listed ancestor."""
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), grpc.StatusCode.INTERNAL)


def trailers_of(error: errors.QuireError) -> tuple[tuple[str, str], ...]:
    """Metadata from which `error_of` makes the same error again."""
    retry = ((_RETRY_KEY, str(max(1, round(error.retry_after_s * 1e3)))),) if error.retry_after_s else ()
    return ((_CODE_KEY, error.code()), (_FIELD_KEY, error.field), *retry)


def went_away(error: grpc.aio.AioRpcError) -> bool:
    """Whether it was the server's end that ended the call, and not its answer."""
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) and not said(error)


def said(error: grpc.aio.AioRpcError) -> str:
    """The code of the error that the server answered with; empty where it was none of Quire's."""
    return str(dict(error.trailing_metadata() or ()).get(_CODE_KEY, ""))


def unsent(error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """The same, of a request of which nothing has left this process."""
    trailers = grpc.aio.Metadata(*(error.trailing_metadata() or ()), (_UNSENT_KEY, "1"))
    return grpc.aio.AioRpcError(error.code(), grpc.aio.Metadata(), trailers, error.details())


def error_of(error: grpc.aio.AioRpcError) -> errors.QuireError:
    """The error that a call ended with, as the server raised it."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    details = error.details() or ""
    if _CODE_KEY in trailers:
        field = str(trailers.get(_FIELD_KEY, ""))
        message = details.removeprefix(f"{field}: ") if field else details
        retry_after_s = int(trailers.get(_RETRY_KEY, 0)) / 1e3
        failure = errors.by_code(str(trailers[_CODE_KEY]))(message, field=field, retry_after_s=retry_after_s)
        failure.answered = True
        return failure
    failure = _bare_error(error.code(), details)
    failure.unsent = _UNSENT_KEY in trailers or details.startswith(_NOT_CONNECTED)
    return failure


def _bare_error(code: grpc.StatusCode, details: str) -> errors.QuireError:
    """Return the error of a call that no Quire server has answered."""
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(details)
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return errors.NodeUnavailable(details)
        case grpc.StatusCode.UNIMPLEMENTED:
            return errors.NotImplementedHere(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.ResourceExhausted(details)
        case grpc.StatusCode.UNAUTHENTICATED:
            return errors.Unauthenticated(details)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return errors.InvalidRequest(details)
        case _:
            return errors.InternalError(f"{code.name}: {details}")
