"""Prefixes into a GPU's memory: written there by UCX, or into pinned memory of the host and copied layer by layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.client import Buffer, Client
from quire.model.descriptor import DeliveryOrder
from quire.model.durability import Durability
from quire.model.errors import InternalError, QuireError
from quire.model.hashing import Namespace, block_keys
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_bench.gpu.device import Device
from quire_tools.report import Row, median

_TIMEOUT_S = 30.0
Compute = Callable[[int], object]
"""What the model does with a layer, once it is there."""


def nothing(_: int) -> None:
    """No compute."""


@dataclass(frozen=True, slots=True)
class Way:
    """How bytes get to the device. `buffer`: what storage nodes write to; `staging`: it, if it is not the device's."""

    name: str
    buffer: Buffer
    staging: torch.Tensor | None


class Deliveries:
    """One prefix of `mib` MiB in `layers` layers, stored once, delivered into the device's memory as often as asked."""

    def __init__(self, client: Client, device: Device, mib: int, layers: int) -> None:
        self._client, self._device = client, device
        self.layers = layers
        layout = KvLayout(layers, 16, 8, 128, Dtype.BF16)
        self._chunks = max(1, (mib << 20) // layout.chunk_bytes)
        self.bytes = layout.payload_bytes(self._chunks)
        self._namespace = Namespace("bench gpu", os.urandom(4).hex(), layout)
        self._keys: ChunkKeys = block_keys(self._namespace, list(range(self._chunks * layout.chunk_tokens)))
        self._source, self._target = device.host(self.bytes), device.memory(self.bytes)
        self._source.random_(0, 256, generator=torch.Generator().manual_seed(7))
        self._expected = self._source.to(device.torch)
        self.notes: list[str] = []
        stored = client.register(self._source)
        session = client.store(self._namespace, self._keys, 0, stored, durability=Durability.MEMORY, complete=True)
        session.commit()
        session.quiesced(_TIMEOUT_S)
        client.free(stored)

    def ways(self) -> list[Way]:
        """Pinned staging everywhere; the device's own memory where UCX can register it."""
        staging = self._device.host(self.bytes)
        ways = [Way("pinned staging", self._client.register(staging), staging)]
        if self._device.is_cuda:
            try:
                ways.append(Way("device memory", self._client.register(self._target), None))
            except (QuireError, ValueError, RuntimeError) as error:
                self.notes.append(f"UCX here does not register memory of the device: {error}")
        return ways

    def close(self, ways: list[Way]) -> None:
        for way in ways:
            self._client.free(way.buffer)

    def deliver(self, way: Way, compute: Compute = nothing) -> None:
        """Each layer is computed with as soon as it is there."""
        retrieval = self._client.retrieve(
            self._namespace, self._keys, way.buffer, lease_ttl_ms=0, order=DeliveryOrder.LAYERWISE
        )
        if retrieval.delivery is None:
            raise InternalError("nothing was found")
        copies, size = self._device.copies(), self.bytes // self.layers
        for layer in range(self.layers):
            retrieval.delivery.layer(layer)
            if way.staging is not None:
                part = slice(layer * size, (layer + 1) * size)
                copies.copy(self._target[part], way.staging[part])
                copies.before_compute()
            compute(layer)
        self._device.synchronize()
        retrieval.delivery.summary()
        retrieval.delivery.quiesced(_TIMEOUT_S)

    def verify(self) -> None:
        """Raises `InternalError` for other bytes than were stored; forgets what was delivered."""
        if not torch.equal(self._target, self._expected):
            raise InternalError("other bytes came into the device's memory than were stored")
        self._target.zero_()
        self._device.synchronize()

    def copy_seconds(self) -> float:
        """What the host's memory alone takes to the device."""
        return self._device.seconds(lambda: self._target.copy_(self._source, non_blocking=True))


def measure(deliveries: Deliveries, device: Device, rounds: int) -> list[Row]:
    """Delivery alone, and beside a compute of about its length, by way."""
    rows, ways = list[Row](), deliveries.ways()
    copy_s = median([deliveries.copy_seconds() for _ in range(rounds + 1)][1:])
    for way in ways:
        alone: list[float] = []
        for _ in range(rounds + 1):
            alone.append(device.seconds(lambda way=way: deliveries.deliver(way)))  # type: ignore[misc]
            deliveries.verify()
        load_s = median(alone[1:])
        figures = {"ms": load_s * 1e3, "GB/s": deliveries.bytes / load_s / 1e9}
        rows.append(Row({"part": "delivery", "way": way.name}, figures, copy_s * 1e3, copy_s / load_s))
        rows.append(_overlapped(deliveries, device, way, load_s, rounds))
    deliveries.close(ways)
    return rows


def _overlapped(deliveries: Deliveries, device: Device, way: Way, load_s: float, rounds: int) -> Row:
    compute = _compute_of(device, load_s / deliveries.layers)

    def all_layers() -> None:
        for layer in range(deliveries.layers):
            compute(layer)

    compute_s = median([device.seconds(all_layers) for _ in range(rounds + 1)][1:])
    both: list[float] = []
    for _ in range(rounds + 1):
        both.append(device.seconds(lambda: deliveries.deliver(way, compute)))
        deliveries.verify()
    together_s, serial_s = median(both[1:]), load_s + compute_s
    hidden = (serial_s - together_s) / min(load_s, compute_s)
    figures = {"compute alone, ms": compute_s * 1e3, "together, ms": together_s * 1e3, "hidden, %": hidden * 100}
    return Row({"part": "overlap", "way": way.name}, figures, serial_s * 1e3, serial_s / together_s)


def _compute_of(device: Device, seconds: float) -> Compute:
    """Matrix products that take about so long."""
    dtype = torch.bfloat16 if device.is_cuda else torch.float32
    factor: Any = torch.randn(1024, 1024, device=device.torch, dtype=dtype)

    def product(times: int) -> None:
        for _ in range(times):
            torch.mm(factor, factor)

    product(3)
    once_s = device.seconds(lambda: product(20)) / 20
    times = max(1, round(seconds / once_s))
    return lambda layer: product(times)
