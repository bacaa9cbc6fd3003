"""Who may come in, and whether there is room: tokens, tenants' limits, and a gateway that is late already."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Final

from quire.clock import Clock
from quire.errors import NotAllowed, ResourceExhausted, Unauthenticated
from quire.hashing import tenant_name
from quire.rpc.credentials import AUTHORIZATION, bearer, is_member
from quire.telemetry import counter, names
from quire_gateway.config import GatewayConfig
from quire_gateway.core.limits import Limits, TenantLimits
from quire_gateway.errors import GatewayLate, TenantExhausted, TransfersExhausted
from quire_gateway.keyring import KeyRing

_LOOK_S: Final = 0.05
_NOBODY: Final = secrets.token_hex(20)


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who asks. `salt`: the one that its namespaces must have, None for any. Members have no limits."""

    tenant: str = ""
    salt: bytes | None = None
    read_only: bool = False
    member: bool = False
    rdma: bool = True


class Doorman:
    """`QUIRE_GATEWAY_AUTH` says whether tokens are asked for; limits hold either way."""

    def __init__(self, config: GatewayConfig, keys: KeyRing, clock: Clock) -> None:
        self._config = config
        self._keys = keys
        self._clock = clock
        self._limits = TenantLimits(
            Limits(config.tenant_requests_max, config.tenant_bytes_max, config.tenant_memory_max)
        )
        self._late_s = 0.0
        self._shed = 0
        self._shed_counter = counter(
            names.SHED_REQUESTS,
            "1",
            "requests that were turned away",
            [{"reason": kind.__name__} for kind in (GatewayLate, TenantExhausted, TransfersExhausted)],
        )
        self._watch: asyncio.Task[None] | None = None

    @property
    def figures(self) -> dict[str, float]:
        return {**self._limits.figures, "shed": self._shed, "late_ms": round(self._late_s * 1e3, 1)}

    def start(self) -> None:
        self._watch = asyncio.create_task(self._watch_loop())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def who(self, header: str) -> Visitor:
        """By the `Authorization` header. Raises `Unauthenticated`; an unknown key takes as long as a wrong secret."""
        token = bearer(header)
        if token and is_member(token, self._config.cluster_secret):
            return Visitor(member=True)
        if self._config.auth == "off":
            return Visitor()
        name, _, secret = token.partition(":")
        key = await self._keys.get(name) if name else None
        expected = self._keys.secret(key) if key is not None else _NOBODY
        if not hmac.compare_digest(secret.encode(), expected.encode()) or key is None:
            raise Unauthenticated("a key that `quire keys` made is needed, as Bearer NAME:SECRET", field=AUTHORIZATION)
        return Visitor(key.tenant, self._keys.salt(key.tenant), key.read_only, rdma=key.rdma)

    @contextlib.asynccontextmanager
    async def let_in(
        self,
        context: Any,
        *,
        write: bool = False,
        salt: bytes | None = None,
        tenant: str = "",
        payload: int = 0,
        memory: int = 0,
    ) -> AsyncIterator[Visitor]:
        """One request. `salt`: of the namespace that it names; `tenant`: of the lease that it brings.

        Raises `Unauthenticated`, `NotAllowed`, and `TenantExhausted` or `GatewayLate` before anything was begun.
        """
        visitor = await self.who(_authorization(context))
        self.check(visitor, write=write, salt=salt, tenant=tenant)
        if memory and not visitor.rdma:
            raise NotAllowed("this key names no memory; `quire keys create --rdma` makes one that does", field="key")
        name = visitor.tenant or (tenant_name(salt) if salt is not None else tenant)
        with self.admitted(visitor, name, payload=payload, memory=memory):
            yield visitor

    @contextlib.contextmanager
    def admitted(self, visitor: Visitor, tenant: str = "", *, payload: int = 0, memory: int = 0) -> Iterator[None]:
        """Room for one request. Raises `TenantExhausted`, `GatewayLate`; counts what is turned away."""
        try:
            if payload and self._config.late_max_ms and self._late_s * 1e3 > self._config.late_max_ms:
                late_ms = round(self._late_s * 1e3)
                raise GatewayLate(f"this gateway is {late_ms} ms late", retry_after_s=max(0.1, self._late_s))
            name = tenant or visitor.tenant
            room = self._limits.admitted(name, payload, memory) if not visitor.member else contextlib.nullcontext()
            with room:
                yield
        except ResourceExhausted as error:
            self._shed += 1
            self._shed_counter.add(1, {"reason": type(error).__name__})
            raise

    def check(self, visitor: Visitor, *, write: bool, salt: bytes | None = None, tenant: str = "") -> None:
        """Raises `NotAllowed`."""
        if write and visitor.read_only:
            raise NotAllowed("this key only reads", field=AUTHORIZATION)
        if visitor.salt is not None and salt is not None and not hmac.compare_digest(salt, visitor.salt):
            raise NotAllowed("not this tenant's salt; `quire keys` tells it", field="namespace.tenant_salt")
        if visitor.salt is not None and tenant and tenant != tenant_name(visitor.salt):
            raise NotAllowed("another tenant's lease", field="lease")

    async def _watch_loop(self) -> None:
        """How late the loop runs: what is asked now will be answered that much later."""
        while True:
            before_s = self._clock.monotonic_s()
            await self._clock.sleep(_LOOK_S)
            late_s = max(0.0, self._clock.monotonic_s() - before_s - _LOOK_S)
            self._late_s = max(late_s, 0.8 * self._late_s)


def _authorization(context: Any) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == AUTHORIZATION), "")
