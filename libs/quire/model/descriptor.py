"""The ObjectCache request descriptor (Table 1 of the paper): one value type for gRPC and for the S3 header.

The header form is versioned and compact: a fixed part, the keys, the target, the chunks' offsets, in base64url. It is
arithmetic and no manifest: every range that the storage node reads follows from these fields.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.errors import DescriptorInvalid, TargetInvalid
from quire.model.keys import KEY_BYTES, ChunkKeys
from quire.model.layout import SLICE_BYTES_MAX

_FIXED: Final = struct.Struct("<BBHHQIIIQQQHHB")
_TOKEN: Final = struct.Struct("<QQH")
_VERSION: Final = 2
_OFFSET_BYTES: Final = 8
_LAYERS_MAX: Final = 1024
_WORKER_ADDRESS_BYTES_MAX: Final = 4096
_REMOTE_KEY_BYTES_MAX: Final = 1024
_PROOF_BYTES_MAX: Final = 1024


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text, altchars=b"-_", validate=True)


def _with_proof(text: str, proof: bytes) -> str:
    return f"{text}.{_encoded(proof)}" if proof else text


class DeliveryOrder(Enum):
    """Order of arrival. Bytes land at the same places in every order."""

    AUTO = 1
    LAYERWISE = 2
    CHUNKWISE = 3


@dataclass(frozen=True, slots=True)
class RdmaTarget:
    """Registered memory of a client: `length` bytes at `address` of the process behind `worker_address`.

    `proof`: that the address is the client's own; gateways ask for it where they ask for tokens.
    """

    worker_address: bytes
    address: int
    length: int
    remote_key: bytes
    proof: bytes = field(default=b"", compare=False)

    def __post_init__(self) -> None:
        if not 0 < len(self.worker_address) <= _WORKER_ADDRESS_BYTES_MAX:
            raise TargetInvalid(f"{len(self.worker_address)} bytes", field="target.worker_address")
        if not 0 < len(self.remote_key) <= _REMOTE_KEY_BYTES_MAX:
            raise TargetInvalid(f"{len(self.remote_key)} bytes", field="target.remote_key")
        if len(self.proof) > _PROOF_BYTES_MAX:
            raise TargetInvalid(f"{len(self.proof)} bytes", field="target.proof")
        if self.address <= 0 or self.length <= 0 or self.address + self.length > 1 << 64:
            raise TargetInvalid(f"{self.length} bytes at {self.address:#x} is no range of memory", field="target")

    def to_token(self) -> str:
        """Return the `x-amz-rdma-token` header: wire, address, length, worker address, remote key and proof."""
        fixed = _TOKEN.pack(self.address, self.length, len(self.worker_address))
        return _with_proof("ucx1." + _encoded(fixed + self.worker_address + self.remote_key), self.proof)

    @classmethod
    def from_token(cls, text: str) -> RdmaTarget:
        """The inverse of `to_token`. Raises `TargetInvalid`."""
        wire, _, packed = text.partition(".")
        packed, _, proof = packed.partition(".")
        if wire != "ucx1":
            raise TargetInvalid(f"{wire[:16]!r} is no wire of ours; there is ucx1", field="x-amz-rdma-token")
        try:
            raw, proof_bytes = _decoded(packed), _decoded(proof)
            address, length, worker = _TOKEN.unpack_from(raw)
        except (binascii.Error, ValueError, struct.error) as error:
            raise TargetInvalid(f"not understood: {error}", field="x-amz-rdma-token") from None
        start = _TOKEN.size
        return cls(raw[start : start + worker], address, length, raw[start + worker :], proof_bytes)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A delivery and its target: layer l of the i-th delivered chunk lands at l·stride + offset_i of the target.

    `num_layers` L, `chunk_tokens` G, `slice_bytes` S (per_layer_chunk_bytes in the paper). Delivered are `chunk_count`
    chunks (0: all) from `first_chunk` on: those before it the client has. `layer_stride`: bytes from a layer to the
    next, 0 for N·S. `chunk_offsets`: N offsets within a layer, 8 bytes each, little-endian, empty for offset_i = i·S:
    with both, slices land in an engine's own blocks. That slices of different layers do not overlap is the client's
    business. Raises `DescriptorInvalid`, `TargetInvalid`.
    """

    keys: ChunkKeys
    num_layers: int
    chunk_tokens: int
    slice_bytes: int
    order: DeliveryOrder
    target: RdmaTarget
    first_chunk: int = 0
    chunk_count: int = 0
    layer_stride: int = 0
    chunk_offsets: bytes = b""

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
        if not 0 <= self.first_chunk < len(self.keys) or not 0 <= self.chunk_count <= len(self.keys) - self.first_chunk:
            raise DescriptorInvalid(
                f"{self.chunk_count} chunks from {self.first_chunk} on, of {len(self.keys)}",
                field="descriptor.first_chunk, chunk_count",
            )
        self._check_places()

    def _check_places(self) -> None:
        last = self.layer_bytes - self.slice_bytes
        if self.chunk_offsets:
            if len(self.chunk_offsets) != _OFFSET_BYTES * self.chunks:
                raise DescriptorInvalid(
                    f"{len(self.chunk_offsets)} bytes for {self.chunks} chunks", field="descriptor.chunk_offsets"
                )
            offsets = np.sort(np.frombuffer(self.chunk_offsets, dtype="<u8"))
            last = int(offsets[-1])
            if last >> 62:
                raise DescriptorInvalid(f"{last} is no offset in memory", field="descriptor.chunk_offsets")
            if self.chunks > 1 and int(np.diff(offsets).min()) < self.slice_bytes:
                raise DescriptorInvalid("chunks overlap", field="descriptor.chunk_offsets")
        least = self.slice_bytes if self.chunk_offsets else self.layer_bytes
        if self.num_layers > 1 and self.stride < least:
            raise DescriptorInvalid(f"{self.layer_stride}, {least} at least", field="descriptor.layer_stride")
        end = (self.num_layers - 1) * self.stride + last + self.slice_bytes
        if self.target.length < end:
            raise TargetInvalid(f"{self.target.length} bytes, but the payload ends at {end}", field="target.length")

    @property
    def chunks(self) -> int:
        """N: how many are delivered."""
        return self.chunk_count or len(self.keys) - self.first_chunk

    @property
    def stop_chunk(self) -> int:
        """Position behind the last one."""
        return self.first_chunk + self.chunks

    @property
    def payload_bytes(self) -> int:
        """W = N·L·S."""
        return self.chunks * self.num_layers * self.slice_bytes

    @property
    def layer_bytes(self) -> int:
        """N·S: what all chunks have of one layer."""
        return self.chunks * self.slice_bytes

    @property
    def stride(self) -> int:
        """Bytes from a layer to the next one in the target."""
        return self.layer_stride or self.layer_bytes

    def offsets(self) -> npt.NDArray[np.int64]:
        """(N,): where each delivered chunk lies within a layer of the target."""
        if self.chunk_offsets:
            return np.frombuffer(self.chunk_offsets, dtype="<u8").astype(np.int64)
        return np.arange(self.chunks, dtype=np.int64) * self.slice_bytes

    def among(self, matched: int, take: int | None = None) -> Descriptor:
        """The same of the first `matched` keys alone, and of these the first `take`, at the same places.

        Raises `DescriptorInvalid` where nothing is left of it.
        """
        chunks = min(self.stop_chunk, matched if take is None else take) - self.first_chunk
        if chunks < 1:
            raise DescriptorInvalid(
                f"none of the {matched} matched chunks is requested", field="descriptor.first_chunk"
            )
        offsets = self.chunk_offsets[: _OFFSET_BYTES * chunks]
        stride = self.layer_stride if take is None else self.stride
        return replace(
            self, keys=self.keys.run(0, matched), chunk_count=chunks, layer_stride=stride, chunk_offsets=offsets
        )

    def pick(self, indexes: Sequence[int]) -> Descriptor:
        """The same of some of its delivered chunks alone, at the same places; `indexes` count from `first_chunk`."""
        offsets = self.offsets()[list(indexes)]
        return replace(
            self,
            keys=self.keys.pick(self.first_chunk + index for index in indexes),
            first_chunk=0,
            chunk_count=len(indexes),
            layer_stride=self.stride,
            chunk_offsets=offsets.astype("<u8").tobytes(),
        )

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
            self.first_chunk,
            self.chunk_count,
            self.layer_stride,
            target.address,
            target.length,
            len(target.worker_address),
            len(target.remote_key),
            bool(self.chunk_offsets),
        )
        raw = fixed + self.keys.packed + target.worker_address + target.remote_key + self.chunk_offsets
        return _with_proof(_encoded(raw), target.proof)

    @classmethod
    def from_header(cls, text: str) -> Descriptor:
        """The inverse of `to_header`. Raises `DescriptorInvalid` for anything else."""
        try:
            packed, _, proof = text.partition(".")
            raw, proof_bytes = _decoded(packed), _decoded(proof)
        except (binascii.Error, ValueError) as error:
            raise DescriptorInvalid(f"not base64url: {error}", field="descriptor") from None
        if len(raw) < _FIXED.size:
            raise DescriptorInvalid(f"{len(raw)} bytes are too few", field="descriptor")
        fields = _FIXED.unpack_from(raw)
        version, order, layers, tokens, slice_bytes, count, first, chunks, stride, *where = fields
        address, length, worker_size, key_size, has_offsets = where
        if version != _VERSION:
            raise DescriptorInvalid(f"version {version}, this is {_VERSION}", field="descriptor")
        if order not in (member.value for member in DeliveryOrder):
            raise DescriptorInvalid(f"{order} is no delivery order", field="descriptor.order")
        worker_start = _FIXED.size + count * KEY_BYTES
        key_start = worker_start + worker_size
        offsets_start = key_start + key_size
        if len(raw) < offsets_start or (len(raw) > offsets_start) != bool(has_offsets):
            raise DescriptorInvalid("its parts do not add up to its length", field="descriptor")
        target = RdmaTarget(raw[worker_start:key_start], address, length, raw[key_start:offsets_start], proof_bytes)
        keys, places = ChunkKeys(raw[_FIXED.size : worker_start]), raw[offsets_start:]
        order = DeliveryOrder(order)
        return cls(
            keys,
            num_layers=layers,
            chunk_tokens=tokens,
            slice_bytes=slice_bytes,
            order=order,
            target=target,
            first_chunk=first,
            chunk_count=chunks,
            layer_stride=stride,
            chunk_offsets=places,
        )
