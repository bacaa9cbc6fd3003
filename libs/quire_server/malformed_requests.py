"""Answers to requests that aiohttp cannot parse, in the form of the other errors of an HTTP interface."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

MalformedAnswer = Callable[[HTTPStatus, str], web.Response]
"""Makes the answer, given the status and the reason."""


def protocol_of(server: web.Server, answer: MalformedAnswer | None) -> Callable[[], Any]:
    """Return the factory of the server's protocols. `answer`: None for aiohttp's own, in plain text."""
    if answer is None:
        return server
    make_answer = answer

    class Protocol(web.RequestHandler):
        """aiohttp's, with another answer to a request that it cannot parse."""

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
            kind = HTTPStatus(status)
            if isinstance(exc, LineTooLong):
                kind = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            reason = (message or kind.phrase).partition("\n")[0]
            response = make_answer(kind, reason)
            response.force_close()
            return response

    def protocol() -> Any:
        handler = server()
        handler.__class__ = Protocol  # the server makes them, with arguments that are its own
        return handler

    return protocol
