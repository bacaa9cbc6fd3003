"""The short messages of the data plane, with the trace they belong to. Fixed binary layout, versioned."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from quire.model.errors import InvalidRequest

TRANSFER_ID_BYTES: Final = 16
_NO_TRACE: Final = bytes(25)
_FORMAT: Final = struct.Struct("<BB16sHHHx25s")  # version, kind, transfer, node index, layer, status, trace
_VERSION: Final = 1
ALL_LAYERS: Final = 0xFFFF


@dataclass(frozen=True, slots=True)
class LayerReady:
    """Storage node → client: this node's stripe of `layer` is complete in the client's memory.

    `layer` is `ALL_LAYERS` for a chunkwise delivery. `trace` is the binary W3C context: trace id, span id, flags.
    """

    transfer_id: bytes
    node_index: int
    layer: int
    trace: bytes = _NO_TRACE


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Storage node → client: this node touches the client's memory no more.

    `chunks`: how many it has delivered, or keeps as was asked; 0 of a transfer that failed.
    """

    transfer_id: bytes
    node_index: int
    chunks: int
    trace: bytes = _NO_TRACE


@dataclass(frozen=True, slots=True)
class LayerProduced:
    """Client → storage node: `layer` of the chunks to store is in the source buffer."""

    transfer_id: bytes
    layer: int
    trace: bytes = _NO_TRACE


@dataclass(frozen=True, slots=True)
class Stalled:
    """Client → storage node: for how long, in all, it waited for this node's stripes of the layers of a delivery."""

    transfer_id: bytes
    node_index: int
    stall_us: int
    trace: bytes = _NO_TRACE


@dataclass(frozen=True, slots=True)
class AddressNonce:
    """Storage node → client: the second half of a nonce, which proves that the worker's address is the client's."""

    half: bytes

    @property
    def transfer_id(self) -> bytes:
        """Empty: the nonce belongs to no transfer."""
        return b""


Message = LayerReady | Quiesced | LayerProduced | Stalled | AddressNonce
_LAYER_READY, _QUIESCED, _LAYER_PRODUCED, _STALLED, _ADDRESS_NONCE = 1, 2, 3, 4, 5
_STALL_US_MAX: Final = 0xFFFFFFFF


def encode_message(message: Message) -> bytes:
    """Encode for `decode_message`; a stall of over 71 minutes is sent as that."""
    match message:
        case LayerReady(transfer, node, layer, trace):
            return _FORMAT.pack(_VERSION, _LAYER_READY, transfer, node, layer, 0, trace)
        case Quiesced(transfer, node, chunks, trace):
            high, low = divmod(chunks + 1, 1 << 16)  # 0 and 1 are the release before's, for failed and ended transfers
            return _FORMAT.pack(_VERSION, _QUIESCED, transfer, node, high, low, trace)
        case LayerProduced(transfer, layer, trace):
            return _FORMAT.pack(_VERSION, _LAYER_PRODUCED, transfer, 0, layer, 0, trace)
        case Stalled(transfer, node, stall_us, trace):
            high, low = divmod(min(stall_us, _STALL_US_MAX), 1 << 16)
            return _FORMAT.pack(_VERSION, _STALLED, transfer, node, high, low, trace)
        case AddressNonce(half):
            return _FORMAT.pack(_VERSION, _ADDRESS_NONCE, half, 0, 0, 0, _NO_TRACE)


def decode_message(raw: bytes) -> Message:
    """Decode a message. Raises `InvalidRequest` for bytes that no version of Quire sends."""
    if len(raw) != _FORMAT.size or raw[0] != _VERSION:
        raise InvalidRequest(f"a message of {len(raw)} bytes, version {raw[0] if raw else None}", field="message")
    _, kind, transfer, node, layer, status, trace = _FORMAT.unpack(raw)
    if kind == _LAYER_READY:
        return LayerReady(transfer, node, layer, trace)
    if kind == _QUIESCED:
        return Quiesced(transfer, node, max(0, (layer << 16) + status - 1), trace)
    if kind == _LAYER_PRODUCED:
        return LayerProduced(transfer, layer, trace)
    if kind == _STALLED:
        return Stalled(transfer, node, (layer << 16) + status, trace)
    if kind == _ADDRESS_NONCE:
        return AddressNonce(transfer)
    raise InvalidRequest(f"{kind} is no kind of message", field="message")
