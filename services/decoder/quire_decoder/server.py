"""The decoder's gRPC door. Decoding comes with the image path; until then the answer is an honest UNIMPLEMENTED."""

from __future__ import annotations

import os
from typing import Any

from quire import PROTOCOL_VERSION
from quire.errors import NotImplementedHere
from quire.nodes import Node, Role
from quire.rpc.channels import ChannelPool
from quire.rpc.server import Server
from quire.rpc.service import run_service, serve_member
from quire.v1 import decoder_pb2 as pb
from quire.v1.decoder_pb2_grpc import DecoderServiceServicer, add_DecoderServiceServicer_to_server
from quire_decoder.config import PREFIX, DecoderConfig


class DecoderServicer(DecoderServiceServicer):
    """Declines."""

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        raise NotImplementedHere("this version of Quire does not decode images yet")


async def serve(config: DecoderConfig) -> None:
    """Run until SIGTERM."""
    server = Server(config.listen, ["quire.v1.DecoderService"], requests_max=config.requests_max)
    add_DecoderServiceServicer_to_server(DecoderServicer(), server.grpc)
    channels, incarnation = ChannelPool(), os.urandom(8).hex()

    def describe() -> Node:
        address = config.advertise or config.listen
        return Node(config.node_id, Role.DECODER, address, b"", incarnation, PROTOCOL_VERSION)

    await serve_member(server, channels, config.orchestrator_address, describe, config.stop_grace_s)


def main() -> None:
    run_service("decoder", DecoderConfig, PREFIX, serve)


if __name__ == "__main__":
    main()
