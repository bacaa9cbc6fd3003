"""Look-ups: how much of a prefix can be read, where, whether a fetch is worth it; and the leases that promise it.

Gateways answer their clients with this, without a hop through the orchestrator, which opens leases on the records of
images with it. It needs Redis, and a view of the cluster.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from opentelemetry.trace import SpanKind

from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.index import Match, Pin
from quire.model.keys import BUCKET_CHUNKS, KEYS_MAX, ChunkKeys, KeySample
from quire.model.lease import Lease, LeaseSigner
from quire.model.nodes import Location, Node, NodeAddress, StorageInfo
from quire.model.object_part import ObjectPart
from quire.model.policy import TenantPolicy
from quire.model.profile import Profiles
from quire.model.ranges import ChunkRange
from quire.model.records import check_unchained
from quire.telemetry import meter, names, tally, tracer
from quire_server.clock import Clock, end_ms
from quire_server.core.advice import FetchAdvice, advise
from quire_server.core.placement import (
    Reader,
    addresses_of,
    is_in_objects_alone,
    object_part,
    readable_each,
    readable_ranges,
)
from quire_server.limits.turns import FairTurns
from quire_server.membership.cluster_view import ClusterView

_REDIS: Final = {"db.system.name": "redis"}
_NAMESPACES_COUNTED: Final = 64
_EACH_AT_ONCE: Final = 512
"""Keys of a look-up without a prefix that are looked up together; a larger one takes turns with those of others."""
_LARGE_AT_ONCE: Final = 2
_NOWHERE: Final = Location()


class LookupIndex(Protocol):
    """Port of look-ups to the index; see `quire_server.redis.PrefixIndex`."""

    async def match(self, keys: ChunkKeys | KeySample, pin: Pin | None = None) -> Match: ...
    async def root_holders(self, keys: ChunkKeys) -> list[tuple[str, ...]]: ...
    async def unpin(self, bucket: bytes, key: bytes, lease_id: bytes) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSettings:
    """`secrets`: the cluster's, the first signs leases. `fetch_fixed_ms`: cost of a fetch besides its bytes."""

    secrets: tuple[bytes, ...]
    lease_ttl_ms_max: int = 300_000
    fetch_fixed_ms: float = 10.0


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a client. `prompt_tokens` and `device` ask for advice.

    `unchained`: the keys are no prefix, each stands for itself; then without lease and advice. `scope`: the namespace
    of a lease on them. `sample`: of the keys of a prefix, in place of `keys`; see `LookupAnswer.wanted_bucket`.
    """

    namespace: Namespace
    keys: ChunkKeys
    lease_ttl_ms: int = 0
    client: Location = _NOWHERE
    prompt_tokens: int = 0
    device: str = ""
    unchained: bool = False
    scope: bytes = b""
    sample: KeySample | None = None


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """A look-up's answer: which chunks from the start can be read, where, and the lease on them, signed: `token`.

    For unchained keys `there` says which can be read; `ranges` count those. `tenant`: whose namespace it is, and that
    tenant's share of links. `wanted_bucket`: nothing else is said, as a sample of the keys does not tell. The next
    question has to have all keys of that bucket, or, if there is no such bucket, all keys.
    """

    ranges: Sequence[ChunkRange] = ()
    nodes: Sequence[NodeAddress] = ()
    tenant: TenantPolicy = field(default_factory=TenantPolicy)
    lease: Lease | None = None
    token: bytes = b""
    index_us: int = 0
    advice: FetchAdvice | None = None
    there: Sequence[int] = ()
    objects: ObjectPart = field(default_factory=ObjectPart)
    wanted_bucket: int | None = None

    @property
    def matched_chunks(self) -> int:
        return _covered(self.ranges)

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses of the nodes' gRPC servers, by node."""
        return {node.node_id: node.grpc_address for node in self.nodes}


@dataclass(frozen=True, slots=True)
class _Readable:
    """The readable part of a prefix: its keys, who delivers them, and the nodes that are alive. See `LookupAnswer`."""

    keys: ChunkKeys | KeySample
    ranges: Sequence[ChunkRange]
    live: Mapping[str, Node]
    index_us: int
    objects: ObjectPart = field(default_factory=ObjectPart)
    wanted_bucket: int | None = None


class Lookups:
    """Every method is one request."""

    def __init__(
        self,
        *,
        settings: LookupSettings,
        index: LookupIndex,
        view: ClusterView,
        profiles: Profiles,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._index = index
        self._view = view
        self._profiles = profiles
        self._clock = clock
        self._signer = LeaseSigner(*settings.secrets)
        self._turn = 0
        self._turns = FairTurns(_LARGE_AT_ONCE)
        self._namespaces: dict[str, Namespace] = {}
        self._leased: dict[bytes, int] = {}
        self._expiries: list[tuple[int, bytes]] = []
        self._asked: Counter[tuple[str, str]] = Counter()
        self._events: Counter[str] = Counter(given=0)
        self._seconds = meter().create_histogram(
            names.LOOKUP_SECONDS, "s", "time of a look-up", explicit_bucket_boundaries_advisory=names.SECONDS
        )
        tally(
            names.INDEX_CHUNKS,
            "1",
            "chunks that look-ups asked for",
            lambda: [(count, {"namespace": tag, "result": result}) for (tag, result), count in self._asked.items()],
        )
        tally(
            names.INDEX_LEASES,
            "1",
            "leases by what became of them",
            lambda: [(count, {"event": event}) for event, count in self._events.items()],
        )

    @property
    def asked(self) -> Mapping[tuple[str, str], int]:
        """Chunks that look-ups here asked for, by namespace's tag, and `hit` or `miss`."""
        return self._asked

    @property
    def namespaces(self) -> Mapping[str, Namespace]:
        """Namespaces that are counted, by the tags of `asked`; there `others` stands for all that came later."""
        return self._namespaces

    @property
    def leases(self) -> int:
        """Number of leases that were given here, and neither given back here nor expired."""
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

    async def lookup(self, question: Question) -> LookupAnswer:
        """The longest prefix that can be read, from the replicas nearest to the client; with a lifetime, leased."""
        began_s = self._clock.monotonic_s()
        try:
            return await (self._lookup_each(question) if question.unchained else self._lookup_longest(question))
        finally:
            self._seconds.record(self._clock.monotonic_s() - began_s)

    async def lookup_all(self, questions: Sequence[Question]) -> list[LookupAnswer]:
        """Look up several prefixes concurrently. If one of them fails, no lease is left of the others."""
        if len(questions) == 1:
            return [await self.lookup(questions[0])]
        ends = await asyncio.gather(*map(self.lookup, questions), return_exceptions=True)
        answers = [end for end in ends if not isinstance(end, BaseException)]
        if len(answers) == len(questions):
            return answers
        releases = (self.release(answer.token) for answer in answers if answer.token)
        await asyncio.gather(*releases, return_exceptions=True)  # a lease that stays expires
        raise next(end for end in ends if isinstance(end, BaseException))

    async def peek(self, question: Question) -> LookupAnswer:
        """The longest prefix that can be read, and where; neither counted nor leased."""
        readable = await self._readable(question, question.keys.distinct(), None)
        nodes = addresses_of(readable.ranges, readable.live)
        return LookupAnswer(readable.ranges, nodes, index_us=readable.index_us, objects=readable.objects)

    async def _lookup_longest(self, question: Question) -> LookupAnswer:
        keys, ttl_ms = (question.sample or question.keys).distinct(), question.lease_ttl_ms
        if ttl_ms > self._settings.lease_ttl_ms_max:
            raise InvalidRequest(f"{ttl_ms} ms, {self._settings.lease_ttl_ms_max} at most", field="lease_ttl_ms")
        pin = await self._pin(ttl_ms) if ttl_ms else None
        readable = await self._readable(question, keys, pin)
        if readable.wanted_bucket is not None:
            return LookupAnswer(index_us=readable.index_us, wanted_bucket=readable.wanted_bucket)
        matched, tenant = _covered(readable.ranges), self._view.tenant(question.namespace)
        self._count(question.namespace, matched, len(keys))
        try:
            advice = self._advise(question, tenant, readable, matched)
        except InvalidRequest:
            await self._unpin(readable.keys, matched, pin)
            raise
        nodes = addresses_of(readable.ranges, readable.live)
        answer = LookupAnswer(
            readable.ranges, nodes, tenant, index_us=readable.index_us, advice=advice, objects=readable.objects
        )
        if pin is None or not matched:
            return answer
        lease = self._lease(pin, readable.keys, answer, question.scope)
        self._events["given"] += 1
        self._note(lease)
        return replace(answer, lease=lease, token=self._signer.sign(lease))

    async def _lookup_each(self, question: Question) -> LookupAnswer:
        """Look up unchained keys."""
        keys = question.keys.distinct()
        if question.sample is not None:
            raise InvalidRequest("of unchained keys all are looked up", field="sample")
        if question.lease_ttl_ms:
            raise InvalidRequest("only prefixes are leased", field="lease_ttl_ms")
        check_unchained(keys)
        live, reader, started = self._view.storage_nodes(), self._reader(question), time.perf_counter_ns()
        holders: list[tuple[str, ...]] = []
        with tracer().start_as_current_span(names.INDEX_MATCH, kind=SpanKind.CLIENT, attributes=_REDIS):
            for first in range(0, len(keys), _EACH_AT_ONCE):
                part = keys.run(first, min(_EACH_AT_ONCE, len(keys) - first))
                if len(keys) <= _EACH_AT_ONCE:
                    holders = await self._index.root_holders(part)
                else:
                    async with self._turns.turn(question.namespace.tenant):
                        holders += await self._index.root_holders(part)
        present, ranges = readable_each(holders, live, keys, reader)
        if len(present) < sum(map(bool, holders)):  # a holder is dead, or has joined since the view was taken
            await self._view.refresh()
            live = self._view.storage_nodes()
            present, ranges = readable_each(holders, live, keys, reader)
        self._count(question.namespace, len(present), len(keys))
        index_us = (time.perf_counter_ns() - started) // 1000
        tenant = self._view.tenant(question.namespace)
        return LookupAnswer(ranges, addresses_of(ranges, live), tenant, index_us=index_us, there=tuple(present))

    async def _readable(self, question: Question, keys: ChunkKeys | KeySample, pin: Pin | None) -> _Readable:
        """The part of `keys` that can be read; its last chunk is pinned."""
        live, looked_again, index_us = self._view.storage_nodes(), False, 0
        reader = self._reader(question)
        while True:
            started = time.perf_counter_ns()
            with tracer().start_as_current_span(names.INDEX_MATCH, kind=SpanKind.CLIENT, attributes=_REDIS):
                match = await self._index.match(keys, pin)
            index_us += (time.perf_counter_ns() - started) // 1000
            if match.wanted_bucket is not None:
                return _Readable(keys, (), live, index_us, wanted_bucket=match.wanted_bucket)
            ranges = _ranges(match, live, keys, reader)
            if ranges is not None and _covered(ranges) < match.count and not looked_again:
                # A holder is dead, or has joined since the view was taken: its chunks may be acknowledged.
                await self._view.refresh()
                live, looked_again = self._view.storage_nodes(), True
                ranges = _ranges(match, live, keys, reader)
            if ranges is None:
                await self._unpin(keys, match.count, pin)
                return _Readable(keys, (), live, index_us, wanted_bucket=KEYS_MAX)
            covered = _covered(ranges)
            if pin is None or covered == match.count:
                keys = keys if isinstance(keys, KeySample) else keys.run(0, covered)
                return _Readable(keys, ranges, live, index_us, object_part(match, live, ranges))
            # The pinned chunk cannot be read, and might leave the index with its pin: pin a readable one.
            await self._unpin(keys, match.count, pin)
            if not covered:
                return _Readable(keys, ranges, live, index_us)
            if isinstance(keys, KeySample) and not keys.has(covered - 1):
                return _Readable(keys, (), live, index_us, wanted_bucket=(covered - 1) // BUCKET_CHUNKS)
            keys = keys.run(0, covered)

    def _reader(self, question: Question) -> Reader:
        self._turn += 1
        return Reader(question.namespace.layout.chunk_bytes, question.client, self._view.link_rates, self._turn)

    async def _unpin(self, keys: ChunkKeys | KeySample, count: int, pin: Pin | None) -> None:
        """Give back the pin on the last of `count` chunks."""
        if pin is not None and count:
            await self._index.unpin(keys.bucket_of(count - 1), keys.at(count - 1), pin.lease_id)

    async def _pin(self, ttl_ms: int) -> Pin:
        now_ms = await self._clock.known_ms()
        return Pin(lease_id=os.urandom(16), expires_ms=end_ms(now_ms, ttl_ms), ttl_ms=ttl_ms, now_ms=now_ms)

    def _lease(self, pin: Pin, keys: ChunkKeys | KeySample, match: LookupAnswer, scope: bytes) -> Lease:
        """Over the first of the keys, which matched. All of `keys` did if they are no sample."""
        return Lease(
            lease_id=pin.lease_id,
            tip=keys.at(match.matched_chunks - 1),
            tip_bucket=keys.bucket_of(match.matched_chunks - 1),
            expires_ms=pin.expires_ms,
            ranges=tuple(match.ranges),
            keys_digest=keys.digest() if isinstance(keys, ChunkKeys) else b"",
            addresses=match.addresses,
            tenant=match.tenant,
            namespace=scope,
        )

    async def release(self, token: bytes) -> bool:
        """Give a lease back, expired or not; whether it was held."""
        lease = self._signer.open(token)
        self._leased.pop(lease.lease_id, None)
        released = await self._index.unpin(lease.tip_bucket, lease.tip, lease.lease_id)
        self._events["given back" if released else "was over"] += 1
        return released

    def _advise(
        self, question: Question, tenant: TenantPolicy, readable: _Readable, matched: int
    ) -> FetchAdvice | None:
        """Return advice; None unless it is requested, and without a profile or the scheduler's rate of the link."""
        if not (question.prompt_tokens and question.device and matched):
            return None
        layout = question.namespace.layout
        if question.prompt_tokens < matched * layout.chunk_tokens:
            raise InvalidRequest(f"{question.prompt_tokens}, but more are cached", field="prompt_tokens")
        profile = self._profiles.find(question.namespace.model_id, question.device)
        rate = self._newcomer_rate(readable.ranges[0].node_id)
        if profile is None or rate <= 0:
            return None
        rate = min(rate, tenant.cap_bytes_per_s or rate)
        fixed_s = self._settings.fetch_fixed_ms / 1000
        return advise(profile, layout, question.prompt_tokens, matched, rate, fixed_s, readable.objects)

    def _newcomer_rate(self, storage_node: str) -> int:
        """Return the rate of one more delivery on that node's link, bytes per second; 0: unknown."""
        node = self._view.live.get(storage_node)
        about = node.about if node is not None else None
        return self._view.link_rates.get(about.link, 0) if isinstance(about, StorageInfo) else 0

    def _count(self, namespace: Namespace, matched: int, requested: int) -> None:
        """Count by namespace, up to a number of them; Prometheus keeps a series for each."""
        tag = namespace.tag[:4].hex()
        if len(self._namespaces) < _NAMESPACES_COUNTED:
            self._namespaces.setdefault(tag, namespace)
        elif tag not in self._namespaces:
            tag = "others"
        self._asked[tag, "hit"] += matched
        self._asked[tag, "miss"] += requested - matched


def _ranges(
    match: Match, live: Mapping[str, Node], keys: ChunkKeys | KeySample, reader: Reader
) -> list[ChunkRange] | None:
    """Return the readable ranges; None where a sample has not the keys that decide which nodes read a part of it."""
    if isinstance(keys, KeySample) and is_in_objects_alone(match, live):
        return None
    return readable_ranges(match, live, keys, reader)


def _covered(ranges: Sequence[ChunkRange]) -> int:
    """Chunks from the start on that `ranges` cover."""
    return ranges[-1].stop if ranges else 0
