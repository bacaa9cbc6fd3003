"""Signs requests with botocore, for what its S3 client cannot say: headers of our own, malformed bodies."""

from __future__ import annotations

import asyncio

import aiohttp
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from yarl import URL

Key = tuple[str, str]


def signed(method: str, url: str, key: Key, headers: dict[str, str], body: bytes = b"") -> dict[str, str]:
    """The headers to send."""
    made = AWSRequest(method, url, headers=dict(headers), data=body)
    S3SigV4Auth(Credentials(*key), "s3", "us-east-1").add_auth(made)
    return {name: value if isinstance(value, str) else value.decode() for name, value in made.headers.items()}


def presigned(method: str, url: str, key: Key) -> str:
    """Good for five minutes."""
    made = AWSRequest(method, url)
    S3SigV4QueryAuth(Credentials(*key), "s3", "us-east-1", 300).add_auth(made)
    return str(made.url)


async def request(
    method: str, url: str, key: Key, headers: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers with lower-case names, body."""
    sent = signed(method, url, key, headers or {}, body)
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, URL(url, encoded=True), headers=sent, data=body or None) as answer,
    ):
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read()


async def answered(status: int, method: str, url: str, key: tuple[str, str], *, body: bytes = b"") -> bytes:
    """Ask until an answer has the status, as when a gateway has read a limit; its body."""
    async with asyncio.timeout(20):
        while True:
            code, _, answer = await request(method, url, key, body=body)
            if code == status:
                return answer
            await asyncio.sleep(0.1)
