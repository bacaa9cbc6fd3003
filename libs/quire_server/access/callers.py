"""Roles of callers, by certificate or header, and whether they may call a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from quire.model.errors import NotAllowed, SecretDiffers, Unauthenticated
from quire.wire.credentials import CALLER, proved_role
from quire.wire.tls import MEMBER_NAME, name_of
from quire_server import trace_service
from quire_server.access.roles import roles_of

CheckRole = Callable[[str, Mapping[str, str], Any], None]
_OF_ANY_MEMBER: Final = f"/{trace_service.NAME}/"
_ADMITTED: Final = "to admit the release before this one, set QUIRE_ACCEPT_UNPROVEN=true"
_CERTIFICATE_NAMES: Final = "x509_subject_alternative_name"


def is_of_any_member(path: str) -> bool:
    """Whether any member may call a method. Such a method requires another proof."""
    return path.startswith(_OF_ANY_MEMBER)


def check_certificate(path: str, headers: Mapping[str, str], context: Any) -> None:
    """Check the names in the caller's certificate. Raises `Unauthenticated`, `NotAllowed`."""
    names = context.auth_context().get(_CERTIFICATE_NAMES, ())
    if MEMBER_NAME.encode() not in names:
        raise Unauthenticated("this certificate is no member's", field="certificate")
    allowed = roles_of(path)
    if not any(name_of(role).encode() in names for role in allowed) and not is_of_any_member(path):
        raise NotAllowed(f"{path} is for: {_listed(allowed)}; see the certificate's names", field="certificate")


def check_caller(
    secrets: tuple[bytes, ...], accept_unproven: bool, path: str, headers: Mapping[str, str], context: Any
) -> None:
    """Check the header of a member that calls without TLS.

    Raises `Unauthenticated` without one, `SecretDiffers`, `NotAllowed`.
    """
    header = headers.get(CALLER, "")
    if is_of_any_member(path) or (accept_unproven and not header):
        return
    if not header:
        raise Unauthenticated(f"{path}: no member's role is proved; {_ADMITTED}", field=CALLER)
    role = proved_role(header, path, secrets)
    if not role:
        raise SecretDiffers("its QUIRE_CLUSTER_SECRET is not that of this cluster", field=CALLER)
    allowed = roles_of(path)
    if role not in allowed:
        raise NotAllowed(f"{path} is for: {_listed(allowed)}; this is a {role}", field=CALLER)


def check_own_role(context: Any, role: str) -> None:
    """Compare the role that a member reports with the one that it proved. Raises `NotAllowed`."""
    names = context.auth_context().get(_CERTIFICATE_NAMES, ())
    if names and name_of(role).encode() not in names:
        raise NotAllowed(f"this certificate is not of a {role}", field="certificate")
    header = str(dict(context.invocation_metadata() or ()).get(CALLER, ""))
    if header and header.partition(":")[0] != role:
        raise NotAllowed(f"a {header.partition(':')[0]} reports as a {role}", field=CALLER)


def _listed(roles: frozenset[str]) -> str:
    return ", ".join(sorted(roles)) or "nobody"
