"""The class that vLLM makes, once in its scheduler and once in each worker: it passes on what belongs to which half."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from quire.client import SyncClient
from quire.integrations.staging import StagingPool
from quire.integrations.vllm.blocks import KvBlocks, kernel_of
from quire.integrations.vllm.engine import (
    asynchronous,
    check,
    content_names,
    engine_of,
    only_group,
    staged_blocks_max,
    staging_bytes,
    weights_of,
)
from quire.integrations.vllm.loads import Loads
from quire.integrations.vllm.matching import Matching
from quire.integrations.vllm.naming import BlockFormat, namespace_of
from quire.integrations.vllm.plan import StepPlan, Unstored
from quire.integrations.vllm.settings import Settings
from quire.integrations.vllm.stats import QuirePromMetrics, QuireStats
from quire.integrations.vllm.stores import Stores
from quire.integrations.vllm.worker import WorkerParts
from quire.telemetry import logger


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What goes to the workers with each step."""

    plan: StepPlan


@dataclass
class WorkerFormat(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler of its blocks, once. `direct`: loads need no staging memory."""

    format: BlockFormat
    direct: bool


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers tell the scheduler after a step.

    `loaded`: blocks and seconds of each load that arrived; `settled`: requests whose load is over, and whether it did.
    """

    unstored: list[Unstored]
    loaded: list[tuple[int, float]]
    settled: list[tuple[str, bool]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport), "of the same connector"
        return StepReport(
            [*self.unstored, *other.unstored], [*self.loaded, *other.loaded], [*self.settled, *other.settled]
        )


class QuireConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Raises `ConfigInvalid` at start for models and settings that it does not serve; see docs/integrations/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        self._group = only_group(kv_cache_config)
        check(vllm_config, self._settings, self._kv_transfer_config)
        self._stats, self._stats_lock = QuireStats(), threading.Lock()
        self._client = SyncClient(
            self._settings.gateway,
            timeout_s=self._settings.timeout_s,
            zone=self._settings.zone,
            token=self._settings.token,
        )
        self._client.start()
        self._matching: Matching | None = None
        self._loads: Loads | None = None
        self._stores: Stores | None = None
        if role is KVConnectorRole.SCHEDULER:
            spec, caches = self._group.kv_cache_spec, vllm_config.cache_config
            self._matching = Matching(
                settings=self._settings,
                client=self._client,
                block_tokens=spec.block_size,
                hash_tokens=kv_cache_config.hash_block_size or caches.hash_block_size or spec.block_size,
                asynchronous=asynchronous(vllm_config, self._settings),
                staged_blocks_max=staged_blocks_max(self._settings, vllm_config, kv_cache_config),
                names=content_names(vllm_config, kv_cache_config),
                count=self._count,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a miss later, and nothing worse."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    # ---- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        assert self._matching is not None, "the scheduler's"
        told = [each for _, each in sorted(metadata.items()) if isinstance(each, WorkerFormat)]
        formats = [each.format for each in told]
        config, settings = self._vllm_config, self._settings
        weights = settings.weights or weights_of(config.model_config)
        engine = engine_of(config)
        spaces = [
            namespace_of(
                formats[shard],
                model=settings.model or Path(config.model_config.model).name,
                weights=weights,
                engine=engine,
                tenant_salt=bytes.fromhex(settings.tenant_salt),
                shard=shard,
                shards=len(formats),
            )
            for shard in range(len(formats))
        ]
        digest = spaces[0].digest().hex()[:16]
        logger().info("blocks of this engine", namespace=digest, shards=len(formats), weights=weights)
        self._matching.name(spaces, direct=all(each.direct for each in told))

    def on_new_request(self, request: Any) -> None:
        assert self._matching is not None, "the scheduler's"
        self._matching.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._matching is not None, "the scheduler's"
        return self._matching.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._matching is not None, "the scheduler's"
        self._matching.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self._matching is not None, "the scheduler's"
        cached, tokens = scheduler_output.scheduled_cached_reqs, scheduler_output.num_scheduled_tokens
        scheduled = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        scheduled += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        steps = [(request_id, computed, tokens[request_id]) for request_id, computed in scheduled]
        return StepMetadata(self._matching.step(steps, self._blocks_of))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._matching is not None, "the scheduler's"
        self._matching.ended()
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._matching.settled(report.settled)
            self._matching.unstored(report.unstored)
            self._matching.loaded(report.loaded)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """What is stored was copied by then: vLLM may have its blocks back at once."""
        assert self._matching is not None, "the scheduler's"
        self._matching.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        assert self._matching is not None, "the scheduler's"
        self._matching.reset()
        return True

    def _blocks_of(self, request_id: str) -> Sequence[int]:
        assert self._kv_cache_manager is not None, "bound at start"
        blocks: Sequence[int] = self._kv_cache_manager.get_block_ids(request_id)[0]
        return blocks

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        settings = self._settings
        blocks = KvBlocks({name: kv_caches[name] for name in self._group.layer_names})
        spec = self._group.kv_cache_spec
        layer = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase)[self._group.layer_names[0]]
        self._format = BlockFormat(
            kernel=kernel_of(layer, spec),
            dtype=str(spec.dtype).removeprefix("torch."),
            cache_dtype=str(self._vllm_config.cache_config.cache_dtype),
            shape=blocks.shape,
            strides=blocks.strides,
            layers=blocks.num_layers,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            block_tokens=spec.block_size,
            mla=isinstance(spec, MLAAttentionSpec),
            slab_bytes=blocks.slab_bytes,
        )
        self._format.layout()
        pool = StagingPool(self._client.allocate(staging_bytes(settings, self._vllm_config, self._kv_cache_config)))
        direct = None
        if settings.direct(asynchronous(self._vllm_config, settings)):
            whole = blocks.whole()
            if whole is not None:
                everything, stride, offsets = whole
                direct = self._client.register(everything), stride, offsets
            else:
                logger().info("vLLM's blocks are not one range of memory: loads are staged")
        shard = self._vllm_config.parallel_config.rank
        parts = WorkerParts(client=self._client, blocks=blocks, pool=pool, shard=shard, count=self._count)
        self._loads = Loads(parts, direct=direct, timeout_s=settings.timeout_s)
        self._direct = direct is not None
        self._stores = Stores(parts, settings.level)
        self._layer_of = blocks.layer_of

    def get_handshake_metadata(self) -> WorkerFormat:
        return WorkerFormat(self._format, self._direct)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Stores begin here: `start_load_kv` may come behind the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert self._stores is not None and self._loads is not None, "the worker's"
        for request_id in connector_metadata.plan.abandoned:
            self._loads.abandon(request_id)
            self._stores.finished(request_id)
        for plan in connector_metadata.plan.stores:
            self._stores.start(plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._loads is not None, "the worker's"
        for plan in self._get_connector_metadata().plan.loads:
            self._loads.start(plan)
        for tried in self._get_connector_metadata().plan.tries:
            self._loads.try_out(tried)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._loads is not None and layer_name in self._layer_of:
            self._loads.layer(self._layer_of[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._stores is not None and layer_name in self._layer_of:
            self._stores.layer(self._layer_of[layer_name])

    def wait_for_save(self) -> None:
        assert self._stores is not None and self._loads is not None, "the worker's"
        self._loads.finish_step()
        self._stores.finish_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._loads is not None, "the worker's"
        if self._get_connector_metadata().plan.idle:
            self._loads.pause()
        return None, self._loads.received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._loads.missing() if self._loads is not None else set()

    def build_connector_worker_meta(self) -> StepReport | None:
        assert self._stores is not None and self._loads is not None, "the worker's"
        report = StepReport(self._stores.unstored(), self._loads.times(), self._loads.settled())
        return report if report.unstored or report.loaded or report.settled else None

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
