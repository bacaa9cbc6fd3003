"""Events for routers: blocks that Quire has acknowledged, under vLLM's own hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.integrations.vllm.groups import Group
from quire.integrations.vllm.plan import StoredRun, StorePlan, Unstored

_Store = tuple[str, int, int, int | None]
"""Request, group, first block, and the block of a state."""


@dataclass(slots=True)
class StoredBlocks:
    """Blocks of one group that follow each other in a request.

    Args:
        group: Group of layers.
        hashes: vLLM's hash of each block.
        parent: Hash of the block in front of them; None at the start of the request.
        tokens: Tokens of the blocks.
        lora_name: Name of the request's adapter.
    """

    group: Group
    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    lora_name: str | None


class StoreEvents:
    """Collects events: one for each store that all workers have reported.

    Args:
        hash_tokens: Tokens in each of vLLM's hashes.
    """

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._running: dict[_Store, tuple[StoredBlocks, int]] = {}
        self._events: list[StoredBlocks] = []

    def planned(self, request: Any, group: Group, store: StorePlan) -> None:
        """Note a store that begins. Shards with equal namespaces share one copy."""
        first = store.first if store.state is None else store.state
        end, size = first + len(store.blocks), group.block_tokens
        per_block = size // self._hash_tokens
        parents = min(first, 1)
        ends = request.block_hashes[(first - parents + 1) * per_block - 1 : end * per_block : per_block]
        hashes = [bytes(block) for block in ends]
        blocks = StoredBlocks(
            group=group,
            hashes=hashes[parents:],
            parent=hashes[0] if parents else None,
            tokens=list(request.all_token_ids[first * size : end * size]),
            lora_name=request.lora_request.lora_name if request.lora_request is not None else None,
        )
        self._running[_name_of(store)] = blocks, len(set(store.namespaces))

    def stored(self, report: StoredRun) -> None:
        """Take a worker's report of an acknowledged store."""
        blocks, workers = self._running.pop(_name_of(report), (None, 0))
        if blocks is not None and workers > 1:
            self._running[_name_of(report)] = blocks, workers - 1
        elif blocks is not None:
            self._events.append(blocks)

    def unstored(self, report: Unstored) -> None:
        """Take a worker's report of a failed store."""
        self._running.pop(_name_of(report), None)

    def take(self) -> list[StoredBlocks]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def _name_of(store: StorePlan | StoredRun | Unstored) -> _Store:
    return store.request_id, store.group, store.first, store.state
