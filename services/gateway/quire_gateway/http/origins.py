"""CORS of the Fetch standard: the pages of other sites that may fetch images."""

from __future__ import annotations

from aiohttp import web

from quire_gateway.http.problems import Handler

_EXPOSED = "ETag, Last-Modified, Content-Length, X-Request-Id, X-Quire-Source, Server-Timing"
_ALLOWED = "Authorization, Content-Type, If-Match, If-None-Match, If-Modified-Since, X-Request-Id"
_METHODS = "GET, HEAD, PUT, DELETE"
_MAX_AGE_S = 600


class Origins:
    """`allowed`: origins, by commas; `*` for all, empty for none."""

    def __init__(self, allowed: str) -> None:
        self._allowed = frozenset(origin.strip() for origin in allowed.split(",") if origin.strip())

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer preflight requests of browsers, and name in every answer who may read it."""
        if not self._allowed:
            return await handler(request)
        preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        response = web.Response(status=204) if preflight else await handler(request)
        if not response.prepared:
            self.mark(request, response)
            if preflight:
                response.headers["Access-Control-Allow-Methods"] = _METHODS
                response.headers["Access-Control-Allow-Headers"] = _ALLOWED
                response.headers["Access-Control-Max-Age"] = str(_MAX_AGE_S)
        return response

    def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before the headers leave."""
        origin = request.headers.get("Origin", "")
        if "*" in self._allowed:
            response.headers["Access-Control-Allow-Origin"] = "*"
        elif self._allowed:
            response.headers.add("Vary", "Origin")  # also where this one is not allowed: caches tell them apart
            if origin in self._allowed:
                response.headers["Access-Control-Allow-Origin"] = origin
        if "Access-Control-Allow-Origin" in response.headers:
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
