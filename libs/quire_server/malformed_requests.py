"""Answers to requests that aiohttp cannot parse, in the form of the other errors of an HTTP interface."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

MalformedAnswer = Callable[[HTTPStatus, str], web.Response]
"""Makes the answer, given the status and the reason."""


def protocol_answering(answer: MalformedAnswer) -> type[web.RequestHandler]:
    """Return a class of aiohttp's protocols with another answer to a request that it cannot parse."""

    class Protocol(web.RequestHandler):
        """A connection."""

        __slots__ = ()

        def handle_error(
            self,
            request: web.BaseRequest,
            status: int = 500,
            exc: BaseException | None = None,
            message: str | None = None,
        ) -> web.StreamResponse:
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR or request.writer.output_size > 0:
                return super().handle_error(request, status, exc, message)
            if isinstance(exc, LineTooLong):  # its message quotes the line, which may be a secret
                kind = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                reason = "the request line or a header has more than 8190 bytes"
            else:
                kind = HTTPStatus(status)
                reason = (message or kind.phrase).partition("\n")[0].rstrip(": ")
            response = answer(kind, reason)
            response.force_close()
            return response

    return Protocol


def protocols_of(server: web.Server, kind: type[web.RequestHandler] | None) -> Callable[[], Any]:
    """Return the factory of a server's protocols, which are of that class; None for aiohttp's own."""
    if kind is None:
        return server

    def protocol() -> Any:
        handler = server()
        handler.__class__ = kind  # the server makes them, with arguments that are its own
        return handler

    return protocol
