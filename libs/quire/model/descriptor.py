"""The ObjectCache request descriptor (Table 1 of the paper): one value type for gRPC and for the S3 header.

The header form is versioned and compact: a fixed part, the keys, the target, in base64url. It is arithmetic and no
manifest: every range that the storage node reads follows from these fields.
"""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Final

from quire.model.errors import DescriptorInvalid, TargetInvalid
from quire.model.keys import ChunkKeys
from quire.model.layout import SLICE_BYTES_MAX

_FIXED: Final = struct.Struct("<BBHHQIQQHH")
_TOKEN: Final = struct.Struct("<QQH")
_VERSION: Final = 1
_LAYERS_MAX: Final = 1024
_WORKER_ADDRESS_BYTES_MAX: Final = 4096
_REMOTE_KEY_BYTES_MAX: Final = 1024


class DeliveryOrder(Enum):
    """Who arrives first. Bytes land at the same places in every order."""

    AUTO = 1
    LAYERWISE = 2
    CHUNKWISE = 3


@dataclass(frozen=True, slots=True)
class RdmaTarget:
    """Registered memory of a client: `length` bytes at `address` of the process behind `worker_address`."""

    worker_address: bytes
    address: int
    length: int
    remote_key: bytes

    def __post_init__(self) -> None:
        if not 0 < len(self.worker_address) <= _WORKER_ADDRESS_BYTES_MAX:
            raise TargetInvalid(f"{len(self.worker_address)} bytes", field="target.worker_address")
        if not 0 < len(self.remote_key) <= _REMOTE_KEY_BYTES_MAX:
            raise TargetInvalid(f"{len(self.remote_key)} bytes", field="target.remote_key")
        if self.address <= 0 or self.length <= 0 or self.address + self.length > 1 << 64:
            raise TargetInvalid(f"{self.length} bytes at {self.address:#x} is no range of memory", field="target")

    def to_token(self) -> str:
        """For the `x-amz-rdma-token` header: which wire, then address, length, worker address, remote key."""
        fixed = _TOKEN.pack(self.address, self.length, len(self.worker_address))
        return "ucx1." + base64.urlsafe_b64encode(fixed + self.worker_address + self.remote_key).decode()

    @classmethod
    def from_token(cls, text: str) -> RdmaTarget:
        """The inverse of `to_token`. Raises `TargetInvalid`."""
        wire, _, packed = text.partition(".")
        if wire != "ucx1":
            raise TargetInvalid(f"{wire[:16]!r} is no wire of ours; there is ucx1", field="x-amz-rdma-token")
        try:
            raw = base64.b64decode(packed, altchars=b"-_", validate=True)
            address, length, worker = _TOKEN.unpack_from(raw)
        except (binascii.Error, ValueError, struct.error) as error:
            raise TargetInvalid(f"not understood: {error}", field="x-amz-rdma-token") from None
        start = _TOKEN.size
        return cls(raw[start : start + worker], address, length, raw[start + worker :])


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What to deliver and where to. Layer l of chunk i lands at (l·N + i)·S of the target.

    `num_layers` L, `chunk_tokens` G, `slice_bytes` S (per_layer_chunk_bytes in the paper).
    """

    keys: ChunkKeys
    num_layers: int
    chunk_tokens: int
    slice_bytes: int
    order: DeliveryOrder
    target: RdmaTarget

    def __post_init__(self) -> None:
        if len(self.keys) == 0:
            raise DescriptorInvalid("names no chunk", field="descriptor.chunk_keys")
        self.keys.distinct()
        if not 1 <= self.num_layers <= _LAYERS_MAX:
            raise DescriptorInvalid(f"{self.num_layers} is not in 1..{_LAYERS_MAX}", field="descriptor.num_layers")
        if not 1 <= self.slice_bytes <= SLICE_BYTES_MAX:
            raise DescriptorInvalid(
                f"{self.slice_bytes} is not in 1..{SLICE_BYTES_MAX}", field="descriptor.per_layer_chunk_bytes"
            )
        if not 1 <= self.chunk_tokens <= 0xFFFF:
            raise DescriptorInvalid(f"{self.chunk_tokens} is not in 1..65535", field="descriptor.chunk_tokens")
        if self.target.length < self.payload_bytes:
            raise TargetInvalid(
                f"{self.target.length} bytes, but the payload has {self.payload_bytes}", field="target.length"
            )

    @property
    def payload_bytes(self) -> int:
        """W = N·L·S."""
        return len(self.keys) * self.num_layers * self.slice_bytes

    @property
    def layer_bytes(self) -> int:
        """N·S: what all chunks have of one layer."""
        return len(self.keys) * self.slice_bytes

    def to_header(self) -> str:
        """The compact form for the `x-quire-descriptor` header."""
        target = self.target
        fixed = _FIXED.pack(
            _VERSION,
            self.order.value,
            self.num_layers,
            self.chunk_tokens,
            self.slice_bytes,
            len(self.keys),
            target.address,
            target.length,
            len(target.worker_address),
            len(target.remote_key),
        )
        raw = fixed + self.keys.packed + target.worker_address + target.remote_key
        return base64.urlsafe_b64encode(raw).decode()

    @classmethod
    def from_header(cls, text: str) -> Descriptor:
        """The inverse of `to_header`. Raises `DescriptorInvalid` for anything else."""
        try:
            raw = base64.b64decode(text, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise DescriptorInvalid(f"not base64url: {error}", field="descriptor") from None
        if len(raw) < _FIXED.size:
            raise DescriptorInvalid(f"{len(raw)} bytes are too few", field="descriptor")
        version, order, layers, tokens, slice_bytes, count, address, length, worker_size, key_size = _FIXED.unpack_from(
            raw
        )
        if version != _VERSION:
            raise DescriptorInvalid(f"version {version}, this is {_VERSION}", field="descriptor")
        keys_end = _FIXED.size + count * 32
        if len(raw) != keys_end + worker_size + key_size:
            raise DescriptorInvalid("its parts do not add up to its length", field="descriptor")
        if order not in (member.value for member in DeliveryOrder):
            raise DescriptorInvalid(f"{order} is no delivery order", field="descriptor.order")
        worker = raw[keys_end : keys_end + worker_size]
        target = RdmaTarget(worker, address, length, raw[keys_end + worker_size :])
        return cls(ChunkKeys(raw[_FIXED.size : keys_end]), layers, tokens, slice_bytes, DeliveryOrder(order), target)
