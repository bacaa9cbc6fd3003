"""The scheduler's half of the vLLM connector, with a client that answers on a test's demand."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from quire.client import Lookup
from quire.integrations.vllm.contents import ContentNames
from quire.integrations.vllm.groups import Group, Kind
from quire.integrations.vllm.scheduler.matching import Matching
from quire.integrations.vllm.settings import Settings
from quire.model.errors import QuireError
from quire.model.hashing import Namespace, engine_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire.model.object_part import ObjectPart

GROUP = Group(0, ("layers.0",), Kind.FULL, 32, 8192)
SPACE = Namespace("m", "w", KvLayout(4, 32, 2, 32, Dtype.BF16))


@dataclass
class Request:
    """Stands for vLLM's request: `blocks` full blocks, and five more tokens."""

    request_id: str = "r"
    blocks: int = 4
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens = 32 * self.blocks + 5
        self.block_hashes = [bytes([at]) * 32 for at in range(self.blocks)]


clients: list[Client] = []
REQUEST_BLOCKS = 8


def close_clients() -> None:
    """Close the coroutines of unanswered questions."""
    while clients:
        clients.pop().close()


class Client:
    """Answers questions when a test calls `answer`.

    Args:
        has: Chunks of every prefix, by shard.
        states: By a model's name the unchained chunks of a request with `REQUEST_BLOCKS` blocks.
    """

    def __init__(self, *has: int, states: dict[str, set[int]] | None = None) -> None:
        self.has = list(has)
        self.states = states or {}
        self.fails: QuireError | None = None
        self.objects = ObjectPart()
        self.asked: list[ChunkKeys] = []
        self.released: list[bytes] = []
        self._held: list[tuple[Coroutine[Any, Any, Any], Future[Any]]] = []
        clients.append(self)
        self.asynchronous = self

    async def lookup(
        self, namespace: Namespace, keys: ChunkKeys, *, lease_ttl_ms: int, unchained: bool = False
    ) -> Lookup:
        if self.fails is not None:
            raise self.fails
        self.asked.append(keys)
        if namespace.model_id in self.states:
            return self._states(namespace, keys, lease_ttl_ms, unchained)
        count = min(len(keys), self.has[namespace.shard_index])
        lease = b"lease%d" % len(self.asked) if count else b""
        return Lookup(namespace, keys.run(0, count), lease, (), {}, 0, objects=self.objects)

    async def lookup_shards(
        self, shards: Sequence[tuple[Namespace, ChunkKeys]], *, lease_ttl_ms: int, unchained: bool = False
    ) -> list[Lookup]:
        return [await self.lookup(*shard, lease_ttl_ms=lease_ttl_ms, unchained=unchained) for shard in shards]

    def _states(self, namespace: Namespace, keys: ChunkKeys, lease_ttl_ms: int, unchained: bool) -> Lookup:
        """Look up unchained chunks: several of them, or a single one with a lease."""
        assert unchained != bool(lease_ttl_ms), "what stands for itself is not leased together"
        own = engine_keys(namespace, ChunkKeys(b"".join(Request(blocks=REQUEST_BLOCKS).block_hashes)))
        stored = {own.at(block) for block in self.states[namespace.model_id]}
        indexes = [index for index, key in enumerate(keys) if key in stored]
        lease = b"lease%d" % len(self.asked) if indexes and lease_ttl_ms else b""
        return Lookup(namespace, keys.pick(indexes), lease, (), {}, 0, there=indexes)

    async def release(self, found: Lookup) -> bool:
        self.released.append(found.lease)
        return True

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._held.append((work, future))
        return future

    def close(self) -> None:
        for work, _ in self._held:
            work.close()

    def answer(self) -> None:
        while self._held:
            work, future = self._held.pop(0)
            try:
                future.set_result(asyncio.run(work))
            except QuireError as error:
                future.set_exception(error)


@dataclass
class World:
    client: Client
    now_s: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    staged_blocks_max: int = 8
    direct: bool = True
    groups: Sequence[Group] = (GROUP,)
    stores: bool = True
    loads: bool = True
    asynchronous: bool = False

    def __post_init__(self) -> None:
        client: Any = self.client
        self.matching = Matching(
            settings=Settings.read({"gateway": "g:1", **self.settings}),
            client=client,
            groups=self.groups,
            hash_tokens=32,
            stores=self.stores,
            loads=self.loads,
            asynchronous=self.asynchronous,
            staged_bytes_max=self.staged_blocks_max * GROUP.block_bytes,
            names=ContentNames(media_max=8, media_readable=True),
            count=lambda name, value: self.counted.update({name: self.counted.get(name, 0) + value}),
            now_s=lambda: self.now_s,
        )
        shards = len(self.client.has)
        spaces = [
            [replace(SPACE, model_id=f"m{number}", shard_index=at, shard_count=shards) for at in range(shards)]
            for number in range(len(self.groups))
        ]
        self.matching.name(spaces, direct=self.direct)
