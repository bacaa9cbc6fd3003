"""Who calls: tokens of tenants and of the cluster's members, in a request's metadata."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Final

import grpc

from quire.model.errors import SecretDiffers

AUTHORIZATION: Final = "authorization"
_BEARER: Final = "Bearer "
MEMBER: Final = "member"


def member_token(cluster_secret: str) -> str:
    """What a member, or an operator who knows the cluster's secret, shows; empty without a secret."""
    if not cluster_secret:
        return ""
    return f"{MEMBER}:{hmac.digest(cluster_secret.encode(), b'quire member 1', 'sha256').hex()}"


def is_member(token: str, *cluster_secrets: str) -> bool:
    """By any of the secrets."""
    shown = token.encode()
    return any(hmac.compare_digest(shown, member_token(secret).encode()) for secret in cluster_secrets if secret)


def page_token(cluster_secret: bytes) -> str:
    """What opens the gateway's web page, and nothing else."""
    return hmac.digest(cluster_secret, b"quire page 1", "sha256").hex()[:32]


def spans_token(cluster_secret: bytes) -> str:
    """What a gateway shows to be told the spans that a member keeps, and nothing else."""
    return hmac.digest(cluster_secret, b"quire spans 1", "sha256").hex()


def proof(node_id: str, incarnation: str, secret: bytes) -> bytes:
    """What a member shows when it reports: that it knows the cluster's secret."""
    return hmac.digest(secret, f"quire report\n{node_id}\n{incarnation}".encode(), "sha256")


def check_proof(shown: bytes, node_id: str, incarnation: str, *secrets: bytes) -> None:
    """Raises `SecretDiffers`."""
    if not shown:
        why = "it proves nothing; to let a release before this one in, set QUIRE_ORCHESTRATOR_ACCEPT_UNPROVEN=true"
        raise SecretDiffers(why, field="node.proof")
    if not any(hmac.compare_digest(shown, proof(node_id, incarnation, secret)) for secret in secrets):
        raise SecretDiffers("its QUIRE_CLUSTER_SECRET is not that of this cluster", field="node.proof")


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
