"""Look-ups: how much of a prefix can be read, where, whether a fetch is worth it; and the leases that promise it."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from opentelemetry.trace import SpanKind

from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.lease import Lease, LeaseSigner
from quire.model.nodes import Location, NodeAddress
from quire.model.policy import TenantPolicy
from quire.model.profile import Profiles
from quire.model.ranges import ChunkRange
from quire.telemetry import counter, meter, names, tracer
from quire_orchestrator.cluster import Cluster
from quire_orchestrator.config import OrchestratorConfig
from quire_orchestrator.core.advice import Advice, advise
from quire_orchestrator.core.placement import addresses_of, newcomer_rate, readable_ranges
from quire_orchestrator.policies import Policies
from quire_orchestrator.ports import Clock, Index

_PIN_TRIES = 3
_REDIS = {"db.system.name": "redis"}
_NAMESPACES_COUNTED = 64
_NOWHERE = Location()


@dataclass(frozen=True, slots=True)
class Question:
    """What a client wants to know. `prompt_tokens` and `device` ask for advice."""

    namespace: Namespace
    keys: ChunkKeys
    lease_ttl_ms: int = 0
    client: Location = _NOWHERE
    prompt_tokens: int = 0
    device: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A look-up's answer: which chunks from the start can be read, where, and the lease on them (empty for none)."""

    ranges: Sequence[ChunkRange] = ()
    nodes: Sequence[NodeAddress] = ()
    lease: bytes = b""
    lease_expires_ms: int = 0
    index_us: int = 0
    advice: Advice | None = None

    @property
    def matched_chunks(self) -> int:
        return self.ranges[-1].stop if self.ranges else 0


class Lookups:
    """Every method is one request."""

    def __init__(
        self,
        *,
        config: OrchestratorConfig,
        index: Index,
        cluster: Cluster,
        policies: Policies,
        profiles: Profiles,
        clock: Clock,
    ) -> None:
        self._config = config
        self._index = index
        self._cluster = cluster
        self._policies = policies
        self._profiles = profiles
        self._clock = clock
        self._signer = LeaseSigner(config.cluster_secret.encode())
        self._namespaces: set[str] = set()
        self._leased: dict[bytes, int] = {}
        self._expiries: list[tuple[int, bytes]] = []
        self._asked = meter().create_counter(names.INDEX_CHUNKS, "1", "chunks that look-ups asked for")
        self._leases = counter(names.INDEX_LEASES, "1", "leases by what became of them", [{"event": "given"}])

    @property
    def leases(self) -> int:
        """Those that were given here, until they are given back here or run out."""
        self._forget_expired()
        return len(self._leased)

    def _note(self, lease: Lease) -> None:
        self._leased[lease.lease_id] = lease.expires_ms
        heapq.heappush(self._expiries, (lease.expires_ms, lease.lease_id))
        self._forget_expired()

    def _forget_expired(self) -> None:
        now_ms = self._clock.now_ms()
        while self._expiries and self._expiries[0][0] <= now_ms:
            self._leased.pop(heapq.heappop(self._expiries)[1], None)

    async def lookup(self, question: Question) -> Found:
        """The longest prefix that can be read, from the replicas nearest to the client; with a lifetime, leased."""
        keys, lease_ttl_ms = question.keys.distinct(), question.lease_ttl_ms
        if lease_ttl_ms > self._config.lease_ttl_ms_max:
            raise InvalidRequest(f"{lease_ttl_ms} ms, {self._config.lease_ttl_ms_max} at most", field="lease_ttl_ms")
        tenant = self._policies.tenant(question.namespace)
        for _ in range(_PIN_TRIES):
            now_ms = self._clock.now_ms()
            started = time.perf_counter_ns()
            with tracer().start_as_current_span(names.INDEX_MATCH, kind=SpanKind.CLIENT, attributes=_REDIS):
                match = await self._index.match(keys)
            index_us = (time.perf_counter_ns() - started) // 1000
            live = self._cluster.storage_nodes()
            ranges = readable_ranges(match, live, keys, question.client)
            matched = ranges[-1].stop if ranges else 0
            self._count(question.namespace, matched, len(keys))
            advice = self._advise(question, tenant, ranges, matched)
            found = Found(ranges, addresses_of(ranges, live), index_us=index_us, advice=advice)
            if matched == 0 or lease_ttl_ms == 0:
                return found
            lease = self._lease(keys.run(0, matched), found, lease_ttl_ms, tenant)
            if await self._index.pin(
                lease.tip_bucket, lease.tip, lease.lease_id, lease.expires_ms, lease_ttl_ms, now_ms
            ):
                self._leases.add(1, {"event": "given"})
                self._note(lease)
                return replace(found, lease=self._signer.sign(lease), lease_expires_ms=lease.expires_ms)
            # Evicted between the match and the pin: look again.
        return Found(index_us=index_us)

    async def release(self, token: bytes) -> bool:
        """Give a lease back, expired or not; whether it was held."""
        lease = self._signer.open(token)
        self._leased.pop(lease.lease_id, None)
        held = await self._index.unpin(lease.tip_bucket, lease.tip, lease.lease_id)
        self._leases.add(1, {"event": "given back" if held else "was over"})
        return held

    def _advise(
        self, question: Question, tenant: TenantPolicy, ranges: Sequence[ChunkRange], matched: int
    ) -> Advice | None:
        """None unless it is asked for, and where a profile or the scheduler's word on the link is missing."""
        if not (question.prompt_tokens and question.device and matched):
            return None
        layout = question.namespace.layout
        if question.prompt_tokens < matched * layout.chunk_tokens:
            raise InvalidRequest(f"{question.prompt_tokens}, but more are cached", field="prompt_tokens")
        profile = self._profiles.find(question.namespace.model_id, question.device)
        rate = newcomer_rate(list(self._cluster.live.values()), ranges[0].node_id)
        if profile is None or rate <= 0:
            return None
        rate = min(rate, tenant.cap_bytes_per_s or rate)
        fixed_s = self._config.fetch_fixed_ms / 1000
        return advise(profile, layout, question.prompt_tokens, matched, rate, fixed_s)

    def _lease(self, keys: ChunkKeys, found: Found, ttl_ms: int, tenant: TenantPolicy) -> Lease:
        """Over all of `keys`, which are those that matched."""
        return Lease(
            lease_id=os.urandom(16),
            tip=keys.at(len(keys) - 1),
            tip_bucket=keys.bucket_of(len(keys) - 1),
            expires_ms=self._clock.now_ms() + ttl_ms,
            ranges=tuple(found.ranges),
            keys_digest=keys.digest(),
            addresses={node.node_id: node.grpc_address for node in found.nodes},
            tenant=tenant,
        )

    def _count(self, namespace: Namespace, matched: int, asked: int) -> None:
        """By namespace, the first so many; Prometheus keeps a series for each."""
        tag = namespace.digest()[:4].hex()
        if tag not in self._namespaces and len(self._namespaces) >= _NAMESPACES_COUNTED:
            tag = "others"
        self._namespaces.add(tag)
        self._asked.add(matched, {"namespace": tag, "result": "hit"})
        self._asked.add(asked - matched, {"namespace": tag, "result": "miss"})
