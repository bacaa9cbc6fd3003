"""Reads of one chunk: a record of an image, an S3RDMA Direct GET.

They take no lease: the delivering node holds the chunk during the read, and no other chunk is involved. That saves
two scripts of Redis for each.
"""

from __future__ import annotations

from quire.model.descriptor import Descriptor
from quire.model.errors import ChunkMissing
from quire.model.hashing import Namespace
from quire.model.outcome import FetchSummary
from quire_gateway.kv.transfers import FetchCall, KvTransfers
from quire_server.lookups import Lookups, Question


class SingleChunkReads:
    """Every method is one request."""

    def __init__(self, lookups: Lookups, gateway: KvTransfers) -> None:
        self._lookups = lookups
        self._gateway = gateway

    async def read(self, namespace: Namespace, descriptor: Descriptor, delivery_id: bytes, name: str) -> FetchSummary:
        """Have the descriptor's only chunk written; `name`: what errors call it.

        Raises `ChunkMissing` before anything was written, or a node's failure.
        """
        question, tried = Question(namespace, descriptor.keys), None
        while True:
            match = await self._lookups.lookup(question)
            if not match.matched_chunks or (tried is not None and match.ranges == tried.ranges):
                raise ChunkMissing(f"{name} is not stored", field="key")
            tried = match
            try:
                return await self._gateway.fetch_whole(
                    FetchCall(found=match, delivery_id=delivery_id, descriptor=descriptor)
                )
            except ChunkMissing:
                continue  # it has gone from that node since: to another one, perhaps
