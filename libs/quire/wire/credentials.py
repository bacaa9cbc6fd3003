"""Credentials in a request's metadata: of tenants, operators and the cluster's members."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import grpc

from quire.model.errors import SecretDiffers
from quire.wire.tls import OPERATOR, SERVICES

AUTHORIZATION: Final = "authorization"
_BEARER: Final = "Bearer "
_OPERATOR: Final = "member"  # since the first release
CALLER: Final = "quire-caller"
"""The header that names a member's role, with its proof."""
_ROLES: Final = frozenset({*SERVICES, OPERATOR})


def operator_token(cluster_secret: str) -> str:
    """Return the token of operators, which follows from the cluster's secret; empty without a secret."""
    if not cluster_secret:
        return ""
    return f"{_OPERATOR}:{hmac.digest(cluster_secret.encode(), b'quire member 1', 'sha256').hex()}"


def is_operator(token: str, *cluster_secrets: str) -> bool:
    """Whether a token is that of operators, by any of the secrets."""
    presented = token.encode()
    return any(hmac.compare_digest(presented, operator_token(secret).encode()) for secret in cluster_secrets if secret)


@dataclass(frozen=True)
class Caller:
    """A member that calls others without mutual TLS: by its role, with the cluster's secret."""

    role: str
    secret: bytes

    def header_for(self, path: str) -> tuple[str, str]:
        """Return the header for a method (`/package.Service/Name`), which proves the role to that service alone."""
        service = path.lstrip("/").partition("/")[0]
        return CALLER, f"{self.role}:{_caller_proof(self.secret, self.role, service)}"


@lru_cache(maxsize=256)
def _caller_proof(secret: bytes, role: str, service: str) -> str:
    return hmac.digest(secret, f"quire call 1\n{role}\n{service}".encode(), "sha256").hex()


def proved_role(header: str, path: str, secrets: tuple[bytes, ...]) -> str:
    """Return the role that a caller of a method has proved; empty for none."""
    role, _, digest = header.partition(":")
    if role not in _ROLES:
        return ""
    service = path.lstrip("/").partition("/")[0]
    proofs = [_caller_proof(secret, role, service) for secret in secrets]
    return role if any(hmac.compare_digest(digest.encode(), proof.encode()) for proof in proofs) else ""


def page_token(cluster_secret: bytes) -> str:
    """Derive the password of the gateway's web page, which is good for nothing else."""
    return hmac.digest(cluster_secret, b"quire page 1", "sha256").hex()[:32]


def spans_token(cluster_secret: bytes) -> str:
    """Derive the token by which a gateway reads the spans of a member, which is good for nothing else."""
    return hmac.digest(cluster_secret, b"quire spans 1", "sha256").hex()


def proof(node_id: str, incarnation: str, secret: bytes) -> bytes:
    """Return the proof in a member's reports that it knows the cluster's secret."""
    return hmac.digest(secret, f"quire report\n{node_id}\n{incarnation}".encode(), "sha256")


def check_proof(presented: bytes, node_id: str, incarnation: str, *secrets: bytes) -> None:
    """Check a proof. Raises `SecretDiffers`."""
    if not presented:
        why = "it proves nothing; to let a release before this one in, set QUIRE_ACCEPT_UNPROVEN=true"
        raise SecretDiffers(why, field="node.proof")
    if not any(hmac.compare_digest(presented, proof(node_id, incarnation, secret)) for secret in secrets):
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
