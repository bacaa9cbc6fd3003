"""Permits on their requests: what is signed is the whole message but for the permit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from quire.model.errors import LeaseForged
from quire.model.permit import PermitSigner
from quire_server.clock import Clock


def permit(signer: PermitSigner, request: Any, tenant: str, expires_ms: int) -> None:
    """Sign a request, in place."""
    request.permit = b""
    request.permit = signer.sign(tenant, request.SerializeToString(deterministic=True), expires_ms)


class PermitChecker:
    """Takes each permit once."""

    def __init__(self, signer: PermitSigner, clock: Clock) -> None:
        self._signer = signer
        self._clock = clock
        self._used: OrderedDict[bytes, int] = OrderedDict()  # about in the order in which they expire

    def check(self, request: Any) -> str:
        """The tenant. Raises `LeaseForged` for what no gateway has signed, or was asked for before; `LeaseExpired`."""
        shown, now_ms = bytes(request.permit), self._clock.now_ms()
        request.permit = b""
        tenant, expires_ms = self._signer.verify(shown, request.SerializeToString(deterministic=True), now_ms)
        if shown in self._used:
            raise LeaseForged("this transfer was begun before", field="permit")
        while self._used and next(iter(self._used.values())) <= now_ms:
            self._used.popitem(last=False)
        self._used[shown] = expires_ms
        return tenant
