"""Permits on requests: the signature is over the whole message without the permit, and its type."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from quire.model.errors import TransferRunning
from quire.model.permit import PermitSigner
from quire_server.clock import Clock

_MEMBER_MS: Final = 120_000


def permit(signer: PermitSigner, request: Any, tenant: str, expires_ms: int) -> None:
    """Sign a request, in place."""
    request.permit = b""
    request.permit = signer.sign(tenant, _said(request), expires_ms)


def member_permit(signer: PermitSigner, request: Any, now_ms: int) -> None:
    """Sign a member's request to another one, in place: no tenant's, and good for two minutes."""
    permit(signer, request, "", now_ms + _MEMBER_MS)


class PermitChecker:
    """Takes the permit of a transfer once."""

    def __init__(self, signer: PermitSigner, clock: Clock) -> None:
        self._signer = signer
        self._clock = clock
        self._used: OrderedDict[bytes, int] = OrderedDict()  # about in the order in which they expire

    def check(self, request: Any, *, again: bool = False) -> str:
        """The tenant. Raises `LeaseForged`: no member has signed it; `LeaseExpired`; `TransferRunning`: it came before.

        `again`: the request may be sent twice, as it does the same as once.
        """
        return self._check(request, again=again)[0]

    def check_transfer(self, request: Any) -> tuple[str, float]:
        """The tenant of a transfer, and for how many seconds from now on it is permitted. Raises as `check`."""
        tenant, expires_ms = self._check(request, again=False)
        return tenant, (expires_ms - self._clock.now_ms()) / 1000

    def _check(self, request: Any, *, again: bool) -> tuple[str, int]:
        permit, now_ms = bytes(request.permit), self._clock.now_ms()
        request.permit = b""
        tenant, expires_ms = self._signer.verify(permit, _said(request), now_ms)
        if again:
            return tenant, expires_ms
        if permit in self._used:
            raise TransferRunning("this transfer was begun before", field="permit")
        while self._used and next(iter(self._used.values())) <= now_ms:
            self._used.popitem(last=False)
        self._used[permit] = expires_ms
        return tenant, expires_ms


def _said(request: Any) -> bytes:
    return bytes(request.DESCRIPTOR.full_name.encode() + b"\0" + request.SerializeToString(deterministic=True))
