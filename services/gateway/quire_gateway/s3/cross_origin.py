"""Preflights of browsers, and the CORS headers of other answers; see `cors`."""

from __future__ import annotations

from aiohttp import web

from quire_gateway.s3.access import Authenticator, tenant_of
from quire_gateway.s3.call import Call
from quire_gateway.s3.cors import (
    METHODS,
    SETTING,
    CorsRule,
    allowing,
    answer_to_anyone,
    asked_headers,
    forbidden,
    read_cors,
)
from quire_gateway.s3.ports import Buckets
from quire_gateway.s3.public import PublicBuckets


class CrossOrigin:
    """Applies the CORS rules of buckets."""

    def __init__(self, buckets: Buckets, authenticator: Authenticator, public: PublicBuckets) -> None:
        self._buckets = buckets
        self._public = public
        self._authenticator = authenticator

    async def answer(self, call: Call) -> web.StreamResponse:
        """Answer a preflight. Raises `S3Error` AccessForbidden."""
        origin, method = call.header("Origin"), call.header("Access-Control-Request-Method").upper()
        if not origin or method not in METHODS:
            raise forbidden("a preflight has an Origin and an Access-Control-Request-Method")
        headers = asked_headers(call.http.headers)
        tenant = await self._tenant(call)
        if not tenant or not call.bucket:
            return web.Response(headers=answer_to_anyone(origin, method, headers))
        rule = allowing(await self._rules(tenant, call.bucket), origin, method, headers)
        if rule is None:
            raise forbidden("This CORS request is not allowed")
        answer = rule.answer(origin)
        if headers:
            answer["Access-Control-Allow-Headers"] = ", ".join(headers)
        return web.Response(headers=answer)

    async def _tenant(self, call: Call) -> str:
        """Return whose bucket a preflight is for, if that is known. Raises `S3Error` AccessForbidden."""
        if call.tenant:
            if not await self._public.is_public(call.tenant, call.bucket):
                raise forbidden("This CORS request is not allowed")
            return call.tenant
        key = await self._authenticator.claimed_key(call.signed)
        return tenant_of(key, call.bucket) if key is not None else ""

    async def check(self, call: Call) -> None:
        """Add the CORS headers to the answer.

        Raises:
            S3Error: AccessForbidden for a request with a signature in a header, for which browsers send a preflight,
                if the bucket's rules do not allow it.
        """
        origin = call.header("Origin")
        if not origin or not call.bucket:
            return
        rules = await self._rules(call.caller.tenant_of(call.bucket), call.bucket)
        rule = allowing(rules, origin, call.method)
        if rule is not None:
            call.shared_headers.update(rule.answer(origin))
        elif rules and call.header("Authorization"):
            raise forbidden("This CORS request is not allowed")

    async def _rules(self, tenant: str, bucket: str) -> list[CorsRule]:
        stored = (await self._buckets.settings(tenant, bucket)).get(SETTING)
        return read_cors(stored)[0] if stored else []
