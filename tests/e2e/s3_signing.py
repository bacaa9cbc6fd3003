"""Signs requests with botocore, for what its S3 client cannot say: headers of our own, malformed bodies."""

from __future__ import annotations

from typing import Any

import aiohttp
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from yarl import URL


async def request(
    method: str, url: str, key: tuple[str, str], headers: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers with lower-case names, body."""
    made = AWSRequest(method, url, headers=dict(headers or {}), data=body)
    S3SigV4Auth(Credentials(*key), "s3", "us-east-1").add_auth(made)
    sent: Any = {name: value if isinstance(value, str) else value.decode() for name, value in made.headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, URL(url, encoded=True), headers=sent, data=body or None) as answer,
    ):
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read()
