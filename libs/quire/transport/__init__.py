"""The data plane as a port, with two ends: UCX, and memory of this process for tests of what stands above it."""

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
]
