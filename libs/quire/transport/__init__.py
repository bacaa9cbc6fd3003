"""The data plane as a port, with two ends: UCX, and memory of this process for tests of what stands above it."""

from __future__ import annotations

from quire.model.errors import ConfigInvalid
from quire.transport.base import PayloadStream, Peer, Region, Remote, Transport
from quire.transport.messages import LayerProduced, LayerReady, Message, Quiesced, Stalled, decode_message

__all__ = [
    "LayerProduced",
    "LayerReady",
    "Message",
    "PayloadStream",
    "Peer",
    "Quiesced",
    "Region",
    "Remote",
    "Stalled",
    "Transport",
    "decode_message",
    "ucx_transport",
]


def ucx_transport(**config: str) -> Transport:
    """UCX in the running loop. `config`: settings of UCX without their prefix, e.g. TLS="tcp".

    Loads UCX, which reads its settings from the environment and is told there to leave the process alone. Raises
    `ConfigInvalid` where it is not installed.
    """
    try:
        from quire.transport.ucx import UcxTransport
    except ImportError as error:
        raise ConfigInvalid(f"the data plane needs UCX: {error}", field="transport") from None
    return UcxTransport(**config)
