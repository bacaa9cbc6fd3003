"""The class that vLLM makes, once in its scheduler and once in each worker: it passes on what belongs to which half."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import MLAAttentionSpec, group_kernel_blocks
from vllm.v1.request import RequestStatus

from quire.client import Buffer, Client
from quire.integrations.staging import StagingPool
from quire.integrations.vllm.engine import (
    asynchronous,
    check,
    content_names,
    engine_of,
    groups_of,
    hash_tokens,
    resumes_behind_failures,
    staged_bytes_max,
    staging_bytes,
    weights_of,
)
from quire.integrations.vllm.groups import Group, Kind
from quire.integrations.vllm.naming import BlockFormat, namespace_of
from quire.integrations.vllm.plan import LoadTime, Settled, StepPlan, StoredRun, Unstored
from quire.integrations.vllm.scheduler.events import StoreEvents
from quire.integrations.vllm.scheduler.load_cost import LinkTime
from quire.integrations.vllm.scheduler.matching import Matching
from quire.integrations.vllm.settings import Settings
from quire.integrations.vllm.stats import QuirePromMetrics, QuireStats
from quire.integrations.vllm.workers.blocks import KvBlocks, Offsets, kernel_of
from quire.integrations.vllm.workers.loads import Loads
from quire.integrations.vllm.workers.stores import BlockStores
from quire.integrations.vllm.workers.worker import WorkerParts
from quire.telemetry import logger
from quire.transport.devices import copy_stream

_COMPLETE: Final = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Metadata for the workers of a step."""

    plan: StepPlan


@dataclass
class WorkerFormat(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Reports a worker's blocks to the scheduler at the start.

    Args:
        formats: Format of the blocks in each group.
        direct: Whether storage nodes write straight into the blocks.
    """

    formats: list[BlockFormat]
    direct: bool


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Report of workers to the scheduler after a step.

    `loaded`: times of loads that arrived; `settled`: loads that are over.
    """

    unstored: list[Unstored]
    loaded: list[LoadTime]
    settled: list[Settled]
    stored: list[StoredRun]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport), "of the same connector"
        return StepReport(
            [*self.unstored, *other.unstored],
            [*self.loaded, *other.loaded],
            [*self.settled, *other.settled],
            [*self.stored, *other.stored],
        )


class QuireConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Connects vLLM to Quire; see docs/guides/vllm.md. Raises `ConfigInvalid` for models and settings out of scope."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        self._groups = groups_of(kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size)
        check(vllm_config, self._settings, self._kv_transfer_config)
        self._stats, self._stats_lock = QuireStats(), threading.Lock()
        self._client = Client(
            self._settings.gateway,
            timeout_s=self._settings.timeout_s,
            zone=self._settings.zone,
            token=self._settings.token,
        )
        self._client.start()
        self._matching: Matching | None = None
        self._loads: list[Loads] = []
        self._stores: list[BlockStores] = []
        # Groups of which a request's load is not over, and requests of which a load failed in a group.
        self._loading: dict[str, set[int]] = {}
        self._failed: set[str] = set()
        configured = vllm_config.kv_events_config
        self._reports = configured is not None and configured.enable_kv_cache_events
        tokens_per_hash = hash_tokens(vllm_config, kv_cache_config)
        self._events = StoreEvents(tokens_per_hash) if self._reports else None
        if role is KVConnectorRole.SCHEDULER:
            self._matching = Matching(
                settings=self._settings,
                client=self._client,
                groups=self._groups,
                hash_tokens=tokens_per_hash,
                stores=self._kv_transfer_config.kv_role != "kv_consumer",
                # Only where loads are expected does vLLM keep blocks until the steps that write them have ended.
                loads=self._kv_transfer_config.kv_role != "kv_producer",
                asynchronous=asynchronous(vllm_config, self._settings, self._groups),
                staged_bytes_max=staged_bytes_max(self._settings, vllm_config, self._groups),
                names=content_names(vllm_config, kv_cache_config),
                count=self._count,
                events=self._events,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a miss later, and nothing worse."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether layers are waited for within the forward pass; stores take all of them behind it, too."""
        return extra_config.get("load") == "layerwise"

    # ---- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): worker for rank, worker in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Name the blocks of each worker, in the order of their ranks: by stage of the pipeline, then by shard."""
        assert self._matching is not None, "the scheduler's"
        workers = [worker for _, worker in sorted(metadata.items()) if isinstance(worker, WorkerFormat)]
        config, settings = self._vllm_config, self._settings
        weights = settings.weights or weights_of(config.model_config)
        engine = engine_of(config)
        spaces = [
            [
                namespace_of(
                    worker.formats[group.number],
                    model=settings.model or Path(config.model_config.model).name,
                    weights=weights,
                    engine=engine,
                    tenant_salt=bytes.fromhex(settings.tenant_salt),
                    shard=shard,
                    shards=len(workers),
                    context_ranks=config.parallel_config.decode_context_parallel_size,
                )
                for shard, worker in enumerate(workers)
            ]
            for group in self._groups
        ]
        names = ", ".join(shards[0].digest().hex()[:16] for shards in spaces)
        logger().info("blocks of this engine", namespaces=names, shards=len(workers), weights=weights)
        sizes = [
            max(worker.formats[group.number].layers * worker.formats[group.number].slab_bytes for worker in workers)
            for group in self._groups
        ]
        self._matching.name(spaces, direct=all(worker.direct for worker in workers), block_bytes=sizes)

    def on_new_request(self, request: Any) -> None:
        assert self._matching is not None, "the scheduler's"
        self._matching.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._matching is not None, "the scheduler's"
        return self._matching.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._matching is not None, "the scheduler's"
        self._matching.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self._matching is not None, "the scheduler's"
        cached, tokens = scheduler_output.scheduled_cached_reqs, scheduler_output.num_scheduled_tokens
        scheduled = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        scheduled += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        steps = [(request_id, computed, tokens[request_id]) for request_id, computed in scheduled]
        state = scheduler_output.kv_connector_block_state
        return StepMetadata(self._matching.step(steps, self._blocks_of, state.boundary_state_offloads))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._matching is not None, "the scheduler's"
        self._matching.ended()
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._matching.settled(report.settled)
            self._matching.unstored(report.unstored)
            self._matching.loaded(report.loaded)
            for store in report.stored:
                assert self._events is not None, "reported for events alone"
                self._events.stored(store)

    def take_events(self) -> list[BlockStored]:
        """Tell routers, by vLLM's KV events, which blocks Quire has acknowledged."""
        return [
            BlockStored(
                block_hashes=[maybe_convert_block_hash(block) for block in blocks.hashes],
                parent_block_hash=None if blocks.parent is None else maybe_convert_block_hash(blocks.parent),
                token_ids=blocks.tokens,
                block_size=blocks.group.block_tokens,
                lora_id=None,
                medium=MEDIUM_STORAGE,
                lora_name=blocks.lora_name,
                group_idx=blocks.group.number,
                locality="REMOTE",
                ownership="QUIRE",
            )
            for blocks in (self._events.take() if self._events is not None else ())
        ]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return at once: stored blocks were copied by then, and vLLM may have them back."""
        assert self._matching is not None, "the scheduler's"
        parameters = self._matching.finished(request.request_id)
        return False, parameters if request.status in _COMPLETE else None

    def reset_cache(self) -> bool | None:
        assert self._matching is not None, "the scheduler's"
        self._matching.reset()
        return True

    def _blocks_of(self, request_id: str) -> Sequence[Sequence[int]]:
        assert self._kv_cache_manager is not None, "bound at start"
        blocks: Sequence[Sequence[int]] = self._kv_cache_manager.get_block_ids(request_id)
        return blocks

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        settings, config = self._settings, self._vllm_config
        staging = self._client.allocate(staging_bytes(settings, config, self._groups))
        pool = StagingPool(staging)
        blocks_max = self._kv_cache_config.num_blocks
        tables = [
            KvBlocks({name: group_kernel_blocks(kv_caches[name], blocks_max) for name in group.layers})
            for group in self._groups
        ]
        self._formats = [self._format_of(*pair) for pair in zip(self._groups, tables, strict=True)]
        ranges = self._ranges_of(tables)
        self._direct = bool(ranges)
        link, copies = LinkTime(time.monotonic), copy_stream(tables[0].device)
        assert staging.view is not None, "it is host memory"
        copies.pin(staging.view)
        for number, blocks in enumerate(tables):
            parts = WorkerParts(
                client=self._client,
                blocks=blocks,
                pool=pool,
                copies=copies,
                shard=config.parallel_config.rank,
                count=self._count,
            )
            direct = ranges[number] if ranges else None
            self._loads.append(Loads(parts, direct=direct, timeout_s=settings.timeout_s, link=link))
            self._stores.append(BlockStores(parts, settings.level, reports=self._reports))
        self._layer_of = {
            name: (number, layer) for number, blocks in enumerate(tables) for name, layer in blocks.layer_of.items()
        }

    def _format_of(self, group: Group, blocks: KvBlocks) -> BlockFormat:
        """Describe the blocks of a group. Raises `ConfigInvalid` for blocks that Quire does not store."""
        config = self._vllm_config
        spec = self._kv_cache_config.kv_cache_groups[group.number].kv_cache_spec
        layer = get_layers_from_vllm_config(config, AttentionLayerBase)[group.layers[0]]
        is_state = group.kind is Kind.STATE
        parts = f"{spec.mamba_type} {spec.shapes} {spec.dtypes}" if is_state else ""
        blocks_format = BlockFormat(
            group=f"{group.kind.value} {group.reach} {' '.join(group.layers)} {parts}",
            kernel=type(layer).__name__ if is_state else kernel_of(layer, spec),
            dtype="uint8" if is_state else str(spec.dtype).removeprefix("torch."),
            cache_dtype=str(config.cache_config.cache_dtype),
            shape=blocks.shape,
            strides=blocks.strides,
            layers=blocks.num_layers,
            kv_heads=1 if is_state else spec.num_kv_heads,
            head_dim=1 if is_state else spec.head_size,
            block_tokens=group.block_tokens,
            kept_tokens=spec.block_size,
            interleave=config.parallel_config.cp_kv_cache_interleave_size,  # which vLLM settles in its workers
            mla=isinstance(spec, MLAAttentionSpec),
            slab_bytes=blocks.slab_bytes,
            page_bytes=blocks.slab_bytes if is_state else spec.unpadded_page_size_bytes,
            is_state=is_state,
        )
        blocks_format.layout()
        return blocks_format

    def _ranges_of(self, tables: Sequence[KvBlocks]) -> list[tuple[Buffer, int, Offsets]]:
        """Register vLLM's blocks of each group, for storage nodes to write to; empty where loads are staged."""
        if not self._settings.direct(asynchronous(self._vllm_config, self._settings, self._groups)):
            return []
        registered: dict[int, Buffer] = {}
        ranges = []
        for blocks in tables:
            storage = blocks.whole()
            if storage is None:
                logger().info("vLLM's blocks are not one range of memory: loads are staged")
                return []
            memory, stride, offsets = storage
            if memory.data_ptr() not in registered:  # groups share it
                registered[memory.data_ptr()] = self._client.register(memory)
            ranges.append((registered[memory.data_ptr()], stride, offsets))
        return ranges

    def get_handshake_metadata(self) -> WorkerFormat:
        return WorkerFormat(self._formats, self._direct)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Begin stores and asynchronous loads: vLLM may call `start_load_kv` after the forward pass.

        vLLM neither reads nor zeroes the blocks of an asynchronous load before it is reported as received.
        """
        super().bind_connector_metadata(connector_metadata)
        for request_id in connector_metadata.plan.abandoned:
            self._abandon(request_id)
            for stores in self._stores:
                stores.finished(request_id)
        for plan in connector_metadata.plan.stores:
            self._stores[plan.group].start(plan)
        for load in connector_metadata.plan.loads:
            if load.asynchronous:
                self._loading.setdefault(load.request_id, set()).add(load.group)
                self._loads[load.group].start(load)

    def _abandon(self, request_id: str) -> None:
        for loads in self._loads:
            loads.abandon(request_id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().plan.loads:
            if not load.asynchronous:
                self._loads[load.group].start(load)
        for trial in self._get_connector_metadata().plan.tries:
            self._loads[trial.group].try_out(trial)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._loads and layer_name in self._layer_of:
            group, layer = self._layer_of[layer_name]
            self._loads[group].layer(layer)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._stores and layer_name in self._layer_of:
            group, layer = self._layer_of[layer_name]
            self._stores[group].layer(layer)

    def wait_for_save(self) -> None:
        for loads, stores in zip(self._loads, self._stores, strict=True):
            loads.finish_step()
            stores.finish_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report requests as received once no group of their layers is loading; as failed if one of them failed."""
        if self._get_connector_metadata().plan.idle:
            self._loads[0].pause()
        received = set()
        for number, loads in enumerate(self._loads):
            for request_id, arrived in loads.received().items():
                if not arrived and not resumes_behind_failures(self._groups):
                    self._failed.add(request_id)
                    self._abandon(request_id)  # vLLM computes the request from its start
                self._loading[request_id].discard(number)
                if not self._loading[request_id]:
                    del self._loading[request_id]
                    received.add(request_id)
        failed = self._failed & received
        self._failed -= failed
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks = [loads.missing() for loads in self._loads]
        return blocks[0] if blocks and resumes_behind_failures(self._groups) else set()

    def build_connector_worker_meta(self) -> StepReport | None:
        report = StepReport([], [], [], [])
        for loads, stores in zip(self._loads, self._stores, strict=True):
            report = report.aggregate(StepReport(stores.unstored(), loads.times(), loads.settled(), stores.stored()))
        return report if report.unstored or report.loaded or report.settled or report.stored else None

    # ---- both

    def get_kv_connector_stats(self) -> QuireStats | None:
        with self._stats_lock:
            stats, self._stats = self._stats, QuireStats()
        return stats if not stats.is_empty() else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> QuireStats:
        return QuireStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> QuirePromMetrics:
        return QuirePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        self._client.close()

    def _count(self, name: str, value: float) -> None:
        with self._stats_lock:
            self._stats.add(name, value)
