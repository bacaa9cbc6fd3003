"""Errors as problem details (RFC 9457): the status of each error, and what of it a caller may read."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from aiohttp import web

from quire.model.errors import MediaUnsupported, PictureTooLarge, QuireError, QuotaExceeded
from quire.telemetry import logger
from quire.wire.status import status_of
from quire_gateway.errors import NotAcceptable

REQUEST_ID: Final = web.RequestKey("request_id", str)
_OF_GRPC: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 412,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_OF_ERROR: Final[dict[type[QuireError], int]] = {
    NotAcceptable: 406,
    PictureTooLarge: 413,
    MediaUnsupported: 415,
    QuotaExceeded: 507,
}
_TOLD: Final = (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.INSUFFICIENT_STORAGE)
"""Reasons of status codes above 500."""
_RETRY_S: Final = 1
_KEPT_HEADERS: Final = ("Allow", "Content-Range")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A stack trace, and the addresses of members that do not answer, stay in the log."""
    request_id = request.headers.get("X-Request-Id", "")[:64] or os.urandom(8).hex()
    request[REQUEST_ID] = request_id
    try:
        response = await handler(request)
    except QuireError as error:
        status = _OF_ERROR.get(type(error)) or _OF_GRPC.get(status_of(error).name, 500)
        detail = error.message
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in _TOLD:
            logger().warning("a request failed", path=request.path, request_id=request_id, error=str(error))
            detail = "the cluster cannot answer this now; its log has the details"
        response = _problem(status, error.code(), detail, error.field, request_id)
        if error.retry_after_s or status == HTTPStatus.SERVICE_UNAVAILABLE:
            response.headers["Retry-After"] = str(max(_RETRY_S, round(error.retry_after_s or 0)))
        if status == HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
    except ConnectionError:
        raise  # the client went away
    except web.HTTPException as error:
        response = _problem(error.status, type(error).__name__, error.reason, "", request_id)
        response.headers.update({name: error.headers[name] for name in _KEPT_HEADERS if name in error.headers})
    except Exception as error:
        logger().error("a request failed unexpectedly", path=request.path, request_id=request_id, exc_info=error)
        response = _problem(500, "InternalError", "the gateway's log has the details", "", request_id)
    if not response.prepared:
        response.headers["X-Request-Id"] = request_id
    return response


def malformed_problem(status: HTTPStatus, reason: str) -> web.Response:
    """Return the answer to a request that cannot be parsed."""
    code = "RequestTooLong" if status is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE else "BadRequest"
    return _problem(status, code, reason, "", os.urandom(8).hex())


def _problem(status: int, code: str, detail: str, field: str, request_id: str) -> web.Response:
    """`code`: the error's name; `field`: what of the request it is about."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "field": field,
        "request_id": request_id,
    }
    text = json.dumps({name: value for name, value in body.items() if value != ""})
    return web.Response(status=status, text=text, content_type="application/problem+json")
