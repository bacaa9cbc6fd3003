"""Who calls: tokens of tenants and of the cluster's members, in a request's metadata."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Final

import grpc

AUTHORIZATION: Final = "authorization"
_BEARER: Final = "Bearer "
MEMBER: Final = "member"


def member_token(cluster_secret: str) -> str:
    """What a member, or an operator who knows the cluster's secret, shows; empty without a secret."""
    if not cluster_secret:
        return ""
    return f"{MEMBER}:{hmac.digest(cluster_secret.encode(), b'quire member 1', 'sha256').hex()}"


def is_member(token: str, cluster_secret: str) -> bool:
    return bool(cluster_secret) and hmac.compare_digest(token.encode(), member_token(cluster_secret).encode())


def bearer(header: str) -> str:
    """The token of an `Authorization` header; empty for none."""
    return header[len(_BEARER) :] if header.startswith(_BEARER) else ""


def authorization(token: str) -> str:
    """The header that shows a token; empty for none."""
    return _BEARER + token if token else ""


def interceptors(token: str) -> list[grpc.aio.ClientInterceptor]:
    """Add the token to every call of a channel; none without one."""
    return [_Unary(token), _Stream(token)] if token else []


def _with_token(details: Any, token: str) -> Any:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), (AUTHORIZATION, authorization(token)))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _Unary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc, unused-ignore]
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with_token(details, self._token), request)


class _Stream(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc, unused-ignore]
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with_token(details, self._token), request)
