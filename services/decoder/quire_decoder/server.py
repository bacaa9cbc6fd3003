"""The decoder's gRPC frontend: decode, call, answer."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from quire import PROTOCOL_VERSION
from quire.client.memory.remote_memory import PeerTransfers
from quire.model.errors import Abandoned
from quire.model.nodes import Node
from quire.transport import OFF, data_plane
from quire.wire import convert, convert_images
from quire.wire.v1 import decoder_pb2 as pb
from quire.wire.v1.decoder_pb2_grpc import DecoderServiceServicer, add_DecoderServiceServicer_to_server
from quire_decoder.adapters.cluster import GrpcOwners, StoredRecords
from quire_decoder.adapters.encoding import ImagecodecsEncoder
from quire_decoder.adapters.encoding_process import EncodingProcess
from quire_decoder.adapters.engines import make_engine
from quire_decoder.adapters.pictures import read_picture
from quire_decoder.adapters.provenance import C2paProvenance
from quire_decoder.adapters.vae import DEMO_FOLDER, DiffusersVaes, VaeSettings, device_names
from quire_decoder.adapters.weights import find_weights
from quire_decoder.config import PREFIX, DecoderConfig
from quire_decoder.ports import VaeRunner
from quire_decoder.runtime import Decoder, Served
from quire_server.clock import ClusterClock, SystemClock
from quire_server.grpc_server import Server
from quire_server.service import member_channels, member_tls, run_service, serve_member

_ABANDONED_MAX: Final = 1024


class DecoderServicer(DecoderServiceServicer):
    """Maps messages to `Decoder` and back."""

    def __init__(self, decoder: Decoder, remote_memory: PeerTransfers) -> None:
        self._decoder = decoder
        self._remote_memory = remote_memory
        self._making: dict[bytes, asyncio.Task[Served | None]] = {}
        self._abandoned: deque[bytes] = deque(maxlen=_ABANDONED_MAX)  # of requests that are yet to come

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        if request.request_id in self._abandoned:
            raise Abandoned("the caller wants it no more")
        entry, target = convert_images.image_from(request.entry), convert.target_from(request.target)
        rendering = convert_images.rendering_from(request.rendering)
        serving: Coroutine[Any, Any, Served | None]
        if request.cached_only:
            serving = self._decoder.serve_cached(entry, rendering, request.tenant)
        else:
            record = convert_images.leased_record_from(request.record)
            serving = self._decoder.serve(entry, rendering, request.owner_address, record, request.tenant)
        making = self._making[request.request_id] = asyncio.ensure_future(serving)
        try:
            served = await making
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise Abandoned("the caller wants it no more") from None
        finally:
            self._making.pop(request.request_id, None)
        if served is None:
            return pb.DecodeResponse()
        await self._remote_memory.push(served.image, target)
        return pb.DecodeResponse(
            length=len(served.image), source=served.source, build=served.build, stages_us=served.stages_us
        )

    async def Abandon(self, request: pb.AbandonRequest, context: Any) -> pb.AbandonResponse:
        if (making := self._making.get(request.request_id)) is not None:
            making.cancel()
        else:
            self._abandoned.append(request.request_id)
        return pb.AbandonResponse()

    async def EncodeLatent(self, request: pb.EncodeLatentRequest, context: Any) -> pb.EncodeLatentResponse:
        source, target = convert.target_from(request.source), convert.target_from(request.target)
        red, green, blue = request.background_rgb.to_bytes(4, "big")[1:]
        encoded = await self._decoder.encode_latent(source, request.length, request.weights_sha256, (red, green, blue))
        await self._remote_memory.push(encoded.record, target)
        return pb.EncodeLatentResponse(
            record_bytes=len(encoded.record),
            psnr_db=encoded.psnr_db,
            error_max=encoded.error_max,
            first_of_several=encoded.first_of_several,
        )

    async def ReadCached(self, request: pb.ReadCachedRequest, context: Any) -> pb.ReadCachedResponse:
        entry, target = convert_images.image_from(request.entry), convert.target_from(request.target)
        form = await self._decoder.read_cached(entry, target)
        if form is None:
            return pb.ReadCachedResponse()
        return pb.ReadCachedResponse(length=form.length, kind=form.kind, build=form.build)

    async def WriteBack(self, request: pb.WriteBackRequest, context: Any) -> pb.WriteBackResponse:
        record = (convert.target_from(request.record), request.record_length) if request.record_length else None
        image = (convert.target_from(request.image), request.image_length) if request.image_length else None
        entry = convert_images.image_from(request.entry)
        await self._decoder.write_back(entry, record, image, build=request.build, stored=request.stored)
        return pb.WriteBackResponse()


def make_vaes(config: DecoderConfig, folders: Sequence[Path]) -> list[DiffusersVaes]:
    """Return the VAEs of folders on each device. Raises `ConfigInvalid`."""
    weights = find_weights(folders)
    engines_folder = Path(config.engines_folder) if config.engines_folder else None
    return [
        DiffusersVaes(
            weights,
            make_engine(config.engine, device, config.graph_bytes, engines_folder),
            VaeSettings(
                device=device, bytes_max=config.model_bytes, decode_bytes=config.decode_bytes, dtype=config.dtype
            ),
        )
        for device in device_names(config.device)
    ]


async def serve(config: DecoderConfig, wrap: Callable[[VaeRunner], VaeRunner] = lambda vae: vae) -> None:
    """Run until SIGTERM.

    Args:
        config: Of the process.
        wrap: Returns what decodes in the place of the VAEs; for benchmarks.
    """
    folders = [Path(folder) for folder in config.model_folders]
    if DEMO_FOLDER.is_dir():
        folders.append(DEMO_FOLDER)
    vaes = await asyncio.to_thread(make_vaes, config, folders)
    signer: C2paProvenance | None = None
    if config.provenance_certificates or config.provenance_key:
        signer = C2paProvenance(Path(config.provenance_certificates), Path(config.provenance_key))
    tls, incarnation = member_tls(config), os.urandom(8).hex()
    if config.warm:
        for vae in vaes:
            await asyncio.to_thread(vae.warm)
    channels, transport = member_channels(config, "decoder"), data_plane(OFF)
    clock = ClusterClock(SystemClock())
    await transport.start()
    memory = PeerTransfers(transport)
    records = StoredRecords(channels=channels, transport=transport, memory=memory, secrets=config.secrets, clock=clock)
    decoder = Decoder(
        config=config,
        records=records,
        vaes=[wrap(vae) for vae in vaes],
        encoder=ImagecodecsEncoder(),
        make_encoder_process=partial(EncodingProcess, config.encode_bytes, config.encode_timeout_s),
        read_picture=read_picture,
        remote_memory=memory,
        owners=GrpcOwners(channels),
        clock=clock,
        signer=signer,
    )
    server = Server(
        config.listen,
        ["quire.v1.DecoderService"],
        requests_max=config.requests_max,
        tls=tls,
        secrets=config.secrets,
        accept_unproven=config.accept_unproven,
    )
    add_DecoderServiceServicer_to_server(DecoderServicer(decoder, memory), server.grpc)

    def describe() -> Node:
        return Node(
            node_id=config.node_id,
            about=decoder.info,
            grpc_address=config.advertise or config.listen,
            incarnation=incarnation,
            protocol_version=PROTOCOL_VERSION,
            stats=decoder.stats,
            notes={"build": decoder.build, "models": str(len(decoder.info.vaes))},
        )

    await serve_member(server, channels, config, describe, clock=clock)
    decoder.close()
    await transport.close()


def main() -> None:
    run_service("decoder", DecoderConfig, PREFIX, serve)


if __name__ == "__main__":
    main()
