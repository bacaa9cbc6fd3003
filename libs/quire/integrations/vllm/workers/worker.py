"""State that the loads and the stores of one worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.client import SyncClient
from quire.integrations.staging import StagingPool
from quire.integrations.vllm.workers.blocks import KvBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """`shard`: the worker's rank; `count`: adds to its figures."""

    client: SyncClient
    blocks: KvBlocks
    pool: StagingPool
    shard: int
    count: Callable[[str, float], None]
