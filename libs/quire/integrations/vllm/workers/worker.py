"""State that the loads and the stores of one worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.client import Client
from quire.integrations.staging import StagingPool
from quire.integrations.vllm.workers.blocks import KvBlocks
from quire.transport.devices import CopyStream


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """`shard`: the worker's rank; `count`: adds to its figures; `copies`: between vLLM's blocks and staging memory."""

    client: Client
    blocks: KvBlocks
    pool: StagingPool
    copies: CopyStream
    shard: int
    count: Callable[[str, float], None]
