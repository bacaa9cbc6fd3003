"""vLLM's own offloading on Quire: a secondary tier under its memory tier.

    --kv-transfer-config '{"kv_connector": "QuireOffloadingConnector",
        "kv_connector_module_path": "quire.integrations.vllm", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "secondary_tiers": [
            {"type": "QuireTier", "module_path": "quire.integrations.vllm.tier", "gateway": "HOST:PORT"}]}}'

vLLM names chunks, with the group of layers that they are of, so that the state of hybrid models is offloaded, too: a
chunk stands for itself. vLLM's scheduler is never held up: an unknown chunk is looked up again, a failure is a miss or
a chunk that is not stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from quire.integrations.circuit_breaker import CircuitBreaker
from quire.integrations.objects import Owner, address_of, memory_at
from quire.integrations.settings import read_settings
from quire.integrations.transfers import ObjectPart, ObjectSettings, ObjectTransfers
from quire.integrations.vllm.contents import RequestAdapter, Unnamed
from quire.model.errors import ConfigInvalid, QuireError
from quire.telemetry import logger

_FLAG: Final = "secondary_tiers"
_COUNTED: Final = {
    "vllm:quire_tier_failed_lookups": "chunks that count as misses: their look-up failed, or took too long",
    "vllm:quire_tier_skipped_lookups": "chunks that count as misses: Quire is left alone after it did not answer",
    "vllm:quire_tier_failed_loads": "chunks that Quire had and that did not arrive; vLLM computes them",
    "vllm:quire_tier_failed_stores": "chunks that were not stored",
}
_FAILED_LOOKUPS, _SKIPPED_LOOKUPS, _FAILED_LOADS, _FAILED_STORES = _COUNTED


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings(ObjectSettings):
    """Settings of the tier; an invalid value raises `ConfigInvalid`, naming the setting.

    `enable_kv_events`: stores are published as vLLM's KV events. `locality`: "LOCAL" or "REMOTE", for these.
    `weights`: a name in place of that of the model's contents. `trust_image_ids`: no client names two images by one
    UUID, so that chunks of models that see images are shared by engines. `contents`: set by `QuireOffloadingConnector`.
    """

    enable_kv_events: bool = False
    locality: str = Locality.REMOTE.value
    trust_image_ids: bool = False
    contents: str = ""

    def __post_init__(self) -> None:
        self.check(_FLAG)
        if not self.contents:
            raise ConfigInvalid(
                'vLLM does not name the weights and adapters to a tier. Give "kv_connector": '
                '"QuireOffloadingConnector", "kv_connector_module_path": "quire.integrations.vllm"',
                field=_FLAG,
            )


class QuireTier(SecondaryTierManager):  # type: ignore[misc]
    """Tier of one engine. Raises `ConfigInvalid` for invalid settings."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **params: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = settings = read_settings(TierSettings, params, _FLAG)
        self.locality = Locality(settings.locality)
        self._owner = _owner(offloading_spec, settings)
        self._address, length = address_of(primary_kv_view)
        arena = memory_at(self._address, length) if settings.zero_copy else None
        self._transfers = ObjectTransfers(settings, arena)
        self._lookups = _Lookups(tier_type, self)
        self._absence = CircuitBreaker(settings.away_s, "vLLM's tier")
        self._ended: queue.SimpleQueue[tuple[JobResult, list[OffloadKey], list[OffloadKey]]] = queue.SimpleQueue()
        self._running = 0
        self._idle = threading.Condition()
        self._tells = settings.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] = []
        self._counts, self._counting = Counter[str](), threading.Lock()

    # ---- what vLLM asks

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        adapter = _adapter_of(req_context)
        try:
            name = adapter.name() if adapter is not None else b""
        except Unnamed:
            return LookupResult.MISS
        status = self._lookups.lookup(OffloadKey(key + name), req_context) if name is not None else None
        if status is None:
            return LookupResult.RETRY
        return LookupResult.HIT if status else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, self._transfers.load)

    def submit_store(self, job_metadata: TransferJob) -> None:
        async def store(parts: Sequence[ObjectPart]) -> list[int]:
            return [part.at for part in await self._transfers.store(parts)]

        self._begin(job_metadata, store)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        while True:
            try:
                result, stored, failed = self._ended.get_nowait()
            except queue.Empty:
                return results
            self._lookups.mark_miss(failed)
            if stored and self._tells:
                self._events.append(OffloadingEvent(stored, self.medium, removed=False, locality=self.locality))
            results.append(result)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTED.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        with self._counting:
            counts, self._counts = self._counts, Counter()
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            stats.increase_counter(name, count)
        return stats

    def drain_jobs(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._running)

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._transfers.close()
        with self._idle:  # what the loop has not come to the end of ends with it
            self._running = 0
            self._idle.notify_all()

    # ---- looking up, in a thread of vLLM's

    def have(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return which are stored; none if Quire does not answer."""
        absent = [False] * len(keys)
        if self._absence:
            self._count(_SKIPPED_LOOKUPS, len(keys))
            return absent
        places = [self._owner.place(bytes(key), self.block_size_bytes) for key in keys]
        look_up = asyncio.wait_for(self._transfers.objects.have(places), self._settings.lookup_timeout_s)
        try:
            present = self._transfers.client.run(look_up)
        except (QuireError, TimeoutError, RuntimeError) as error:  # the loop has ended with the engine
            self._absence.failed(error)
            self._count(_FAILED_LOOKUPS, len(keys))
            return absent
        self._absence.answered()
        return present

    def _count(self, name: str, chunks: int) -> None:
        if chunks:
            with self._counting:
                self._counts[name] += chunks

    # ---- on the client's loop

    def _begin(self, job: TransferJob, transfer: Any) -> None:
        with self._idle:
            self._running += 1
        named = _named(job)
        if not named:
            self._end(job, named, [], 0.0)
            return
        running = self._run(job, named, transfer)
        try:
            self._transfers.client.spawn(running)
        except RuntimeError as error:  # the loop has ended with the engine
            running.close()
            logger().warning("a job of vLLM's tier came after its end", error=repr(error))
            self._end(job, named, [], 0.0)

    async def _run(self, job: TransferJob, named: list[OffloadKey], transfer: Any) -> None:
        ends = list[int]()
        size = self.block_size_bytes
        began_s = time.monotonic()
        try:
            parts = [
                ObjectPart(at, self._owner.place(bytes(key), size), self._address + int(chunk) * size, size)
                for at, (key, chunk) in enumerate(zip(named, job.chunk_ids, strict=True))
            ]
            ends = await transfer(parts)
        except Exception as error:  # vLLM waits for every job's end
            logger().error("a job of vLLM's tier broke off", exc_info=error)
        finally:
            self._end(job, named, ends, time.monotonic() - began_s)  # also where its loop has ended, and left it

    def _end(self, job: TransferJob, named: list[OffloadKey], ends: Collection[int], took_s: float) -> None:
        """Hand over a job's result. `named`: its keys with the adapter, those of `ends` arrived; none without names."""
        keys = list(job.keys)
        good = [keys[at] for at in sorted(ends)]
        result = JobResult(
            job.job_id,
            success=len(good) == len(keys),
            successful_keys=good if job.is_promotion and good else None,
            transfer_time=took_s,
            transfer_bytes=len(good) * self.block_size_bytes,
        )
        self._count(_FAILED_LOADS if job.is_promotion else _FAILED_STORES, len(keys) - len(good))
        stored = [] if job.is_promotion else good
        failed = [key for at, key in enumerate(named) if at not in set(ends)] if job.is_promotion else []
        self._ended.put((result, stored, failed))
        with self._idle:
            self._running = max(0, self._running - 1)
            self._idle.notify_all()


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """The lookup manager of vLLM: it keeps a known result for as long as a request asks."""

    def __init__(self, tier_type: str, tier: QuireTier) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._tier.have(keys)


def _adapter_of(req_context: ReqContext) -> RequestAdapter | None:
    return (req_context.kv_transfer_params or {}).get(RequestAdapter.PARAMETER)


def _named(job: TransferJob) -> list[OffloadKey]:
    """Return a job's keys with the digest of the request's adapter; none for an adapter without a name."""
    adapter = _adapter_of(job.req_context)
    try:
        name = adapter.current_name() if adapter is not None else b""
    except Unnamed:
        name = None
    return [OffloadKey(key + name) for key in job.keys] if name is not None else []


def _owner(spec: Any, settings: TierSettings) -> Owner:
    """Return everything that decides a chunk's bytes, as far as vLLM gives it to its tiers."""
    config, model = spec.config, Path(spec.config.model.name)
    parallel = config.parallel
    facts = {
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "platform": f"{current_platform.device_name}/{current_platform.get_cpu_architecture().name}",
        "dtype": str(config.model.dtype),
        "tokens": [config.cache.tokens_per_hash, spec.blocks_per_chunk],
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "layout": [str(config.kv_cache_layout), config.canonical_layout, config.replicated_layout],
    }
    form = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return Owner(
        model=model.name if model.is_dir() else str(config.model.name),
        version=f"vllm tier {settings.contents}/{form}",
        tenant_salt=bytes.fromhex(settings.tenant_salt),
    )
