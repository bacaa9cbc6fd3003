"""Result of a look-up, and the descriptor of the part that is to be delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quire.client.memory.buffers import Buffer
from quire.model.choices import choice
from quire.model.descriptor import DeliveryOrder, Descriptor
from quire.model.errors import DescriptorInvalid
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys, KeySample
from quire.model.nodes import Location
from quire.model.object_part import ObjectPart
from quire.model.ranges import ChunkRange
from quire.wire import convert
from quire.wire.v1 import gateway_pb2 as pb

_KEYS_BYTES_MAX: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for which advice is wanted: its length in tokens, and the device that would compute it.

    `device`: a name that the cluster has a profile of, as "a100-80gb".
    """

    tokens: int
    device: str


@dataclass(frozen=True, slots=True)
class SlicePlaces:
    """Places of slices in a buffer: slice l of the i-th chunk at l·`layer_stride` + `chunk_offsets[i]`, in bytes.

    `layer_stride`: 0 for layers that lie back to back. `chunk_offsets`: (chunks,), within a layer; None for chunks back
    to back. With both, slices land in an engine's own blocks.
    """

    layer_stride: int = 0
    chunk_offsets: npt.ArrayLike | None = None

    def packed(self) -> bytes:
        """Return the offsets as the descriptor has them: 8 bytes each, little-endian; empty for back to back."""
        return np.asarray(self.chunk_offsets, dtype="<u8").tobytes() if self.chunk_offsets is not None else b""


@dataclass(frozen=True, slots=True)
class Advice:
    """Fetch or compute, as the cluster predicts it: seconds to the first token if `chunks` are taken, all, or none.

    `window_us`: the compute window per layer with these chunks; `rate_bytes_per_s`: what the link has to give now.
    """

    chunks: int
    window_us: int
    rate_bytes_per_s: int
    ttft_s: float
    ttft_all_s: float
    ttft_none_s: float


@dataclass(frozen=True, slots=True)
class Lookup:
    """The longest cached prefix of the requested keys.

    `keys`: of its chunks; `there`: their positions among the requested ones.

    `lease` (empty for none) is over all of them; `ranges` say which storage node delivers which, `addresses` how each
    of these is reached by the data plane. `objects`: the part that only the object tier has, and how fast that is.
    `arriving_chunks`: the last ones, whose store is still running: only a retrieval that follows stores has any, and no
    lease is over them.
    """

    namespace: Namespace
    keys: ChunkKeys
    lease: bytes
    ranges: tuple[ChunkRange, ...]
    addresses: Mapping[str, bytes]
    index_us: int
    advice: Advice | None = None
    there: Sequence[int] = ()
    objects: ObjectPart = field(default_factory=ObjectPart)
    arriving_chunks: int = 0

    @property
    def matched_chunks(self) -> int:
        """How many chunks can be read or arrive, from the start of the prefix."""
        return len(self.keys)

    @property
    def matched_tokens(self) -> int:
        """The same in tokens."""
        return len(self.keys) * self.namespace.layout.chunk_tokens

    @property
    def take_chunks(self) -> int:
        """How many to take: as advised, or all."""
        return self.advice.chunks if self.advice is not None else len(self.keys)


def lookup_request(
    shards: Sequence[tuple[Namespace, ChunkKeys | KeySample]],
    location: Location,
    lease_ttl_ms: int,
    *,
    prompt: Prompt | None = None,
    unchained: bool = False,
) -> pb.LookupRequest:
    """Return the message of a look-up of several shards, or of one."""
    (namespace, keys), *other_shards = shards
    return pb.LookupRequest(
        namespace=convert.namespace_to(namespace),
        **_keys_to(keys),
        lease_ttl_ms=lease_ttl_ms,
        host=location.host,
        zone=location.zone,
        prompt_tokens=prompt.tokens if prompt is not None else 0,
        device=prompt.device if prompt is not None else "",
        unchained=unchained,
        other_shards=[
            pb.ShardKeys(namespace=convert.namespace_to(rank), **_keys_to(rank_keys))
            for rank, rank_keys in other_shards
        ],
    )


def _keys_to(keys: ChunkKeys | KeySample) -> dict[str, Any]:
    """Return the fields of the keys, or of their sample."""
    if isinstance(keys, ChunkKeys):
        return {"chunk_keys": keys.packed}
    return {"sample": pb.KeySample(count=keys.count, whole_bucket=keys.whole_bucket, keys=keys.packed)}


def shards_at_once(shards: Sequence[tuple[Namespace, ChunkKeys | KeySample]]) -> int:
    """Return how many shards one message has room for."""
    return max(1, _KEYS_BYTES_MAX // max(1, *(len(keys.packed) for _, keys in shards)))


def lookup_of(namespace: Namespace, keys: ChunkKeys, response: pb.LookupResponse) -> Lookup:
    """The gateway's answer to a look-up of `keys`."""
    present: Sequence[int] = range(response.matched_chunks)
    if response.found:
        present = [at for at, is_present in enumerate(response.found) if is_present]
    return Lookup(
        namespace,
        keys.pick(present) if response.found else keys.run(0, response.matched_chunks),
        lease=response.lease,
        ranges=convert.ranges_from(response.ranges),
        addresses={node.node_id: node.worker_address for node in convert.addresses_from(response.nodes)},
        index_us=response.index_us,
        advice=_advice(response.advice) if response.HasField("advice") else None,
        there=present,
        objects=ObjectPart(
            convert.ranges_from(response.object_ranges),
            {name: convert.object_speed_from(speed) for name, speed in response.object_speeds.items()},
        ),
        arriving_chunks=response.arriving_chunks,
    )


def descriptor_of(
    namespace: Namespace,
    keys: ChunkKeys,
    buffer: Buffer,
    places: SlicePlaces | None,
    *,
    order: DeliveryOrder | str,
    first_chunk: int,
    chunk_count: int,
) -> Descriptor:
    """Return the descriptor of `chunk_count` of the keys, from `first_chunk` on.

    Raises `DescriptorInvalid`, `TargetInvalid`.
    """
    if chunk_count < 1:
        raise DescriptorInvalid(f"{chunk_count} chunks from {first_chunk} on", field="chunk_count")
    layout, places = namespace.layout, places or SlicePlaces()
    return Descriptor(
        keys=keys,
        num_layers=layout.num_layers,
        chunk_tokens=layout.chunk_tokens,
        slice_bytes=layout.slice_bytes,
        order=choice(DeliveryOrder, order, "order"),
        target=buffer.target(),
        first_chunk=first_chunk,
        chunk_count=chunk_count,
        layer_stride=places.layer_stride,
        chunk_offsets=places.packed(),
    )


def _advice(message: pb.Advice) -> Advice:
    return Advice(
        message.take_chunks,
        message.compute_window_us,
        message.rate_bytes_per_s,
        message.ttft_us / 1e6,
        message.ttft_all_us / 1e6,
        message.ttft_none_us / 1e6,
    )
