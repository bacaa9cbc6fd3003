"""Admission: the principal of a request, its rights, and its room. The same at every public frontend."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets as random
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from quire.model.errors import NotAllowed, ResourceExhausted, Unauthenticated
from quire.model.hashing import tenant_name
from quire.model.signed_urls import UrlClaim
from quire.telemetry import counter, names
from quire.wire.credentials import AUTHORIZATION, bearer, is_operator
from quire_gateway.access.keyring import KeyRing
from quire_gateway.access.revocation import Revocations
from quire_gateway.config import GatewayConfig
from quire_gateway.core.limits import Limits, Taken, TenantLimits
from quire_gateway.errors import GatewayLate, TenantExhausted, TransfersExhausted
from quire_server import tasks
from quire_server.clock import Clock
from quire_server.redis.keys.access import AccessKey

_LOOK_S: Final = 0.05
_WRONG_SECRET: Final = random.token_hex(20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The principal of a request. `salts`: its namespaces must have one of these; None for any.

    `operator`: knows the cluster's secret, at the admin frontend. `rdma`: may name memory. `key`: the access key that
    was shown.
    """

    tenant: str = ""
    salts: tuple[bytes, ...] | None = None
    read_only: bool = False
    operator: bool = False
    rdma: bool = True
    key: AccessKey | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Needs of a request. `salt`: of the namespace that it names; `tenant`: of the lease that it brings.

    `payload`: bytes that will be on their way; `memory`: of those, bytes in the memory of the client, which it names.
    """

    write: bool = False
    salt: bytes | None = None
    tenant: str = ""
    payload: int = 0
    memory: int = 0


class Audit(Protocol):
    """Records acts of operators and denied accesses; see `quire_gateway.access.audit`."""

    def act(self, act: str, subject: str, error: BaseException | None) -> None: ...
    def request(self, method: str, error: Exception) -> None: ...


class NoAudit:
    """Records nothing."""

    def act(self, act: str, subject: str, error: BaseException | None) -> None:
        return

    def request(self, method: str, error: Exception) -> None:
        return


CALLER: Final[ContextVar[Principal | None]] = ContextVar("caller", default=None)
"""The caller of the request that is being answered, once it is authenticated."""


class Admission:
    """`QUIRE_GATEWAY_AUTH` says whether tokens are asked for. Limits hold for tenants: of a key, or of a salt."""

    def __init__(self, config: GatewayConfig, keys: KeyRing, clock: Clock, audit: Audit | None = None) -> None:
        self.audit = audit or NoAudit()
        self._config = config
        self._keys = keys
        self._clock = clock
        self.revocations = Revocations(keys, clock)
        self._limits = TenantLimits(
            Limits(config.tenant_requests_max, config.tenant_bytes_max, config.tenant_memory_max)
        )
        self._late_s = 0.0
        self._shed = 0
        self._shed_counter = counter(
            names.SHED_REQUESTS,
            "1",
            "requests that were rejected",
            [{"reason": kind.__name__} for kind in (GatewayLate, TenantExhausted, TransfersExhausted)],
        )
        self._watch: list[asyncio.Task[None]] = []

    @property
    def stats(self) -> dict[str, float]:
        return {"shed": self._shed, "late_ms": round(self._late_s * 1e3, 1)}

    @property
    def tenant_stats(self) -> dict[str, float]:
        return self._limits.stats

    def start(self) -> None:
        self._watch = [asyncio.create_task(self._watch_loop()), asyncio.create_task(self.revocations.run())]

    async def close(self) -> None:
        await tasks.end(self._watch)

    async def authenticate(self, header: str) -> Principal:
        """Authenticate by the `Authorization` header.

        Raises `Unauthenticated`; an unknown key takes as long as a wrong secret.
        """
        principal = await self._authenticated(header)
        CALLER.set(principal)
        return principal

    async def _authenticated(self, header: str) -> Principal:
        token = bearer(header)
        if not token.isascii():
            raise Unauthenticated("a token has ASCII characters only", field=AUTHORIZATION)
        if not self._config.asks_for_tokens:
            return Principal()
        name, _, secret = token.partition(":")
        key = await self._keys.get(name) if name else None
        expected = self._keys.secrets(key) if key is not None else [_WRONG_SECRET]
        right = [hmac.compare_digest(secret.encode(), secret_.encode()) for secret_ in expected]
        if not any(right) or key is None:
            raise Unauthenticated(
                "missing or invalid credentials: a key of `quire keys`, as Bearer NAME:SECRET", field=AUTHORIZATION
            )
        return self.principal(key)

    async def authenticate_url(self, claim: UrlClaim) -> Principal:
        """Authenticate a signed URL: it reads its image, for the key's tenant. Raises `NotAllowed`."""
        key = await self._keys.get(claim.key)
        secrets = self._keys.secrets(key) if key is not None else [_WRONG_SECRET]
        if key is None or not any(claim.is_signed_with(secret) for secret in secrets):
            raise NotAllowed("it is not of this URL, or its key was deleted", field="signature")
        if claim.expires_s * 1000 <= self._clock.now_ms():
            raise NotAllowed("this URL's time is over", field="expires")
        if not self._config.asks_for_tokens:
            return Principal(read_only=True, rdma=False)
        return replace(self.principal(key), read_only=True, rdma=False)

    def principal(self, key: AccessKey) -> Principal:
        """Return the principal of an access key whose secret was presented."""
        salts = self._keys.salts(key.tenant)
        principal = Principal(tenant=key.tenant, salts=salts, read_only=key.read_only, rdma=key.rdma, key=key)
        CALLER.set(principal)
        return principal

    async def operator(self, context: Any) -> Principal:
        """Authenticate a gRPC call at the admin frontend. Raises `Unauthenticated`."""
        token = bearer(_authorization_of(context))
        config = self._config
        if not token.isascii() or not is_operator(token, config.cluster_secret, config.cluster_secret_also):
            raise Unauthenticated("operators show that they know the cluster's secret", field=AUTHORIZATION)
        principal = Principal(operator=True)
        CALLER.set(principal)
        return principal

    async def caller(self, context: Any) -> Principal:
        """Return the principal of a gRPC call, or of a session's request. Raises as `authenticate` does."""
        principal: Principal | None = getattr(context, "principal", None)
        if principal is not None:
            CALLER.set(principal)
            return principal
        return await self.authenticate(_authorization_of(context))

    def check(self, principal: Principal, need: Need) -> None:
        """Check what the caller may do, before work of which the extent is not known yet. Raises as `admit`."""
        _check(principal, need)

    @contextlib.contextmanager
    def admit(self, principal: Principal, need: Need) -> Iterator[Taken]:
        """Admit one request, while it runs; the yielded object takes more bytes, once it is known how many will go out.

        Raises `NotAllowed`, and `TenantExhausted` or `GatewayLate`, with the time after which to come again, before
        anything was begun.
        """
        _check(principal, need)
        try:
            if need.payload and self._config.late_max_ms and self._late_s * 1e3 > self._config.late_max_ms:
                late_ms = round(self._late_s * 1e3)
                raise GatewayLate(f"this gateway is {late_ms} ms late", retry_after_s=max(0.1, self._late_s))
            with contextlib.ExitStack() as room:
                tenant = principal.tenant or (tenant_name(need.salt) if need.salt is not None else need.tenant)
                taken = Taken()
                if tenant:
                    taken = room.enter_context(self._limits.admitted(tenant, need.payload, need.memory))
                yield taken
        except ResourceExhausted as error:
            self._shed += 1
            self._shed_counter.add(1, {"reason": type(error).__name__})
            raise

    async def _watch_loop(self) -> None:
        """Measure how late the loop runs: a new request is answered that much later."""
        while True:
            before_s = self._clock.monotonic_s()
            await self._clock.sleep(_LOOK_S)
            late_s = max(0.0, self._clock.monotonic_s() - before_s - _LOOK_S)
            self._late_s = max(late_s, 0.8 * self._late_s)


def _authorization_of(context: Any) -> str:
    """The `Authorization` header of a gRPC call; empty for none."""
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == AUTHORIZATION), "")


def _check(principal: Principal, need: Need) -> None:
    """Check a request against its caller's rights. Raises `NotAllowed`."""
    if need.write and principal.read_only:
        raise NotAllowed("this key only reads", field=AUTHORIZATION)
    salts = principal.salts
    if salts is not None and need.salt is not None and not any(hmac.compare_digest(need.salt, s) for s in salts):
        raise NotAllowed("not this tenant's salt; `quire keys` shows it", field="namespace.tenant_salt")
    if salts is not None and need.tenant and need.tenant not in map(tenant_name, salts):
        raise NotAllowed("another tenant's lease", field="lease")
    if need.memory and not principal.rdma:
        raise NotAllowed("this key names no memory; `quire keys create --rdma` makes one that does", field="key")
