"""The client of `quire bench s3`: signed requests over aiohttp, and memory for what comes by RDMA."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import aiohttp
from yarl import URL

from quire.model.errors import InternalError
from quire.model.hashing import Namespace
from quire_gateway.core.sigv4 import UNSIGNED, Request, authorization


class SignedHttp:
    """One key at one endpoint; `async with`."""

    def __init__(self, url: str, access_key: str, secret: str) -> None:
        self._url = url
        self._host = urlsplit(url).netloc
        self._key = (access_key, secret)

    async def __aenter__(self) -> SignedHttp:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def send(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, data: bytes = b""
    ) -> tuple[Mapping[str, str], bytes]:
        """Headers and body. Raises `InternalError` for an answer that is an error."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        sent = {"host": self._host, "x-amz-date": stamp, "x-amz-content-sha256": UNSIGNED} | dict(headers or {})
        request = Request(method, quote(path), "", [(name.lower(), value) for name, value in sent.items()])
        sent["authorization"] = authorization(request, *self._key, stamp, "us-east-1")
        url = URL(self._url + quote(path), encoded=True)
        async with self._session.request(method, url, headers=sent, data=data or None) as answer:
            body = await answer.read()
            if answer.status >= 300:
                raise InternalError(f"{method} {path}: {answer.status} {body[:300]!r}")
            return answer.headers, body


def namespace_header(namespace: Namespace) -> dict[str, str]:
    """That tells the S3 frontend of which namespace an object's layers are."""
    return {"x-quire-namespace": base64.urlsafe_b64encode(namespace.to_json().encode()).decode()}


async def many(count: int, at_once: int, one: Callable[[int, int], Awaitable[object]]) -> tuple[float, list[float]]:
    """Run `one(number, worker)` for each number; seconds in all, and of each."""
    numbers, times = iter(range(count)), [0.0] * count

    async def work(worker: int) -> None:
        for number in numbers:
            started = time.perf_counter()
            await one(number, worker)
            times[number] = time.perf_counter() - started

    started = time.perf_counter()
    await asyncio.gather(*(work(worker) for worker in range(at_once)))
    return time.perf_counter() - started, times
