"""Assignment of prompts to engines, by the chunks that Quire has of them and their nodes."""

from __future__ import annotations

from typing import Final

from quire.model.assignment import Assignment, EngineTable
from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node, StorageInfo
from quire_orchestrator.cluster import Cluster
from quire_orchestrator.core.assignment import CachedPrompt, Source, assign
from quire_server.lookups import Lookups, Question

_LINK_BYTES_PER_S: Final = 1_250_000_000
"""Of a link whose rate no scheduler reports: 10 Gbit/s."""
_HOST_BYTES_PER_S: Final = 4e9
"""Of copies through shared memory."""
_FIXED_S: Final = 0.010


class Assigning:
    """Every method is one request."""

    def __init__(self, *, lookups: Lookups, cluster: Cluster) -> None:
        self._lookups = lookups
        self._cluster = cluster

    async def assign(
        self, namespace: Namespace, keys: ChunkKeys, prompt_tokens: int, engines: EngineTable
    ) -> Assignment:
        """Choose the engine that prefills a prompt.

        Args:
            namespace: Of the keys.
            keys: Of the prompt's whole chunks.
            prompt_tokens: Length of the prompt.
            engines: The engines that there are.

        Raises:
            InvalidRequest: The prompt is shorter than its chunks, or has none.
        """
        if not len(keys) or prompt_tokens < len(keys) * namespace.layout.chunk_tokens:
            raise InvalidRequest(f"{prompt_tokens} tokens, {len(keys)} chunks", field="prompt_tokens")
        readable = await self._lookups.peek(Question(namespace, keys))
        nodes, rates = self._cluster.storage_nodes(), self._cluster.link_rates
        names = {run.node_id for run in readable.ranges}
        prompt = CachedPrompt(
            tokens=prompt_tokens,
            tip=keys.at(len(keys) - 1),
            layout=namespace.layout,
            ranges=readable.ranges,
            sources={name: _source(nodes.get(name), rates) for name in names},
            objects=readable.objects,
            fixed_s=_FIXED_S,
            host_bytes_per_s=_HOST_BYTES_PER_S,
        )
        return assign(prompt, engines)


def _source(node: Node | None, rates: dict[str, int]) -> Source:
    """Return the host and rate of a storage node; one that has just left is on no engine's host."""
    if node is None or not isinstance(node.about, StorageInfo):
        return Source(host="", bytes_per_s=_LINK_BYTES_PER_S)
    return Source(host=node.location.host, bytes_per_s=rates.get(node.about.link) or _LINK_BYTES_PER_S)
