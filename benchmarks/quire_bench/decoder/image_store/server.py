"""What Quire is compared with: an image store. PNGs in the same object tier, an LRU of PNGs in front, no decoding.

It stands in a decoder's place in a cluster, so that requests take the very same way: an "image" whose record is its
PNG. Only PNG, as it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from typing import Any, Final

from quire import PROTOCOL_VERSION
from quire.client import AsyncClient
from quire.client.memory.remote_memory import PeerTransfers
from quire.model.errors import NotImplementedHere
from quire.model.images import ImageEntry, LeasedRecord, Rendering
from quire.model.nodes import DecoderInfo, Node
from quire.transport import OFF, Transport, data_plane
from quire.wire import convert, convert_images
from quire.wire.channels import ChannelPool, call
from quire.wire.credentials import Caller
from quire.wire.v1 import decoder_pb2 as pb
from quire.wire.v1 import images_pb2
from quire.wire.v1.decoder_pb2_grpc import DecoderServiceServicer, add_DecoderServiceServicer_to_server
from quire.wire.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from quire_decoder.adapters.cluster import StoredRecords
from quire_decoder.config import PREFIX, DecoderConfig
from quire_decoder.core.cache_tiers import LruTier
from quire_server.clock import ClusterClock, SystemClock
from quire_server.grpc_server import Server
from quire_server.service import member_channels, run_service, serve_member

_TAIL_SHARE: Final = 0.1


class ImageStore(DecoderServiceServicer):
    """A cache of PNGs before the store. Requests for one image that come while it is fetched wait for it."""

    def __init__(self, config: DecoderConfig, channels: ChannelPool, transport: Transport, clock: ClusterClock) -> None:
        self._delay_s = config.fetch_delay_ms / 1e3
        self._remote_memory = PeerTransfers(transport)
        self._records = StoredRecords(
            channels=channels,
            transport=transport,
            memory=self._remote_memory,
            secrets=config.secrets,
            clock=clock,
        )
        self._tier: LruTier[bytes] = LruTier(config.cache_bytes, _TAIL_SHARE)
        self._held: dict[bytes, bytes] = {}
        self._fetching: dict[bytes, asyncio.Task[bytes]] = {}
        self.requests = self.hits = 0

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        entry = convert_images.image_from(request.entry)
        if convert_images.rendering_from(request.rendering) != Rendering("png"):
            raise NotImplementedHere("this store has PNGs, as they are", field="rendering")
        if request.cached_only:
            return pb.DecodeResponse()  # a look-up costs nothing here: `Decode` proper counts it
        self.requests += 1
        key, stages = entry.record_sha256, {}
        if self._tier.hit(key) is not None:
            self.hits += 1
            source, image = "image", self._held[key]
        else:
            started = time.perf_counter()
            joined = key in self._fetching
            source = "joined" if joined else "miss"
            image = await self._fetch(entry, convert_images.leased_record_from(request.record))
            stages["fetch"] = int((time.perf_counter() - started) * 1e6)
        await self._remote_memory.push(image, convert.target_from(request.target))
        return pb.DecodeResponse(length=len(image), source=source, build="png", stages_us=stages)

    async def Abandon(self, request: pb.AbandonRequest, context: Any) -> pb.AbandonResponse:
        return pb.AbandonResponse()  # what is fetched is kept

    async def EncodeLatent(self, request: pb.EncodeLatentRequest, context: Any) -> pb.EncodeLatentResponse:
        raise NotImplementedHere("an image store has no latents")

    async def ReadCached(self, request: pb.ReadCachedRequest, context: Any) -> pb.ReadCachedResponse:
        raise NotImplementedHere("an image store decodes nothing for others")

    async def WriteBack(self, request: pb.WriteBackRequest, context: Any) -> pb.WriteBackResponse:
        raise NotImplementedHere("an image store decodes nothing for others")

    async def _fetch(self, entry: ImageEntry, leased: LeasedRecord) -> bytes:
        key = entry.record_sha256
        if key not in self._fetching:
            task = self._fetching[key] = asyncio.create_task(self._fetch_now(entry, leased))
            task.add_done_callback(lambda done: self._fetching.pop(key, None))
        return await asyncio.shield(self._fetching[key])

    async def _fetch_now(self, entry: ImageEntry, leased: LeasedRecord) -> bytes:
        await asyncio.sleep(self._delay_s)
        image = await self._records.fetch(entry, leased)
        self._held[entry.record_sha256] = image
        for gone in self._tier.insert(entry.record_sha256, len(image)):
            self._held.pop(gone, None)
        return image


async def put_png(client: AsyncClient, orchestrator: tuple[str, Caller], name: str, png: bytes, side: int) -> None:
    """Store a PNG as a chunk, and catalogue it as the record of an image: gateways take latent records alone."""
    digest = hashlib.sha256(png).digest()
    entry = ImageEntry(name, digest, len(png), digest, "", side, side)
    buffer = client.allocate(entry.namespace.layout.chunk_bytes)
    assert buffer.view is not None, "host memory"
    memoryview(buffer.view.data)[: len(png)] = png
    session = await client.store(entry.namespace, entry.keys, 0, buffer, complete=True)
    await session.commit()
    buffer.close()
    address, caller = orchestrator
    channels = ChannelPool(caller=caller)
    stub: OrchestratorServiceStub = OrchestratorServiceStub(channels.get(address))
    request = images_pb2.PutImageRequest(entry=convert_images.image_to(entry))
    await call(stub.PutImage, request, timeout_s=client.timeout_s, again=False)
    await channels.close()


async def serve(config: DecoderConfig) -> None:
    """Run until SIGTERM."""
    channels, transport, incarnation = member_channels(config, "decoder"), data_plane(OFF), os.urandom(8).hex()
    clock = ClusterClock(SystemClock())
    await transport.start()
    store = ImageStore(config, channels, transport, clock)
    server = Server(config.listen, ["quire.v1.DecoderService"], requests_max=config.requests_max)
    add_DecoderServiceServicer_to_server(store, server.grpc)

    def describe() -> Node:
        return Node(
            node_id=config.node_id,
            about=DecoderInfo(build="png"),
            grpc_address=config.advertise or config.listen,
            incarnation=incarnation,
            protocol_version=PROTOCOL_VERSION,
            stats={"requests": store.requests, "hits.image": store.hits},
        )

    await serve_member(server, channels, config, describe, clock=clock)
    await transport.close()


def main() -> None:
    run_service("decoder", DecoderConfig, PREFIX, serve)


if __name__ == "__main__":
    main()
