"""vLLM's KV blocks as bytes: where each layer's slabs lie, and copies between them and staging memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.model.errors import ConfigInvalid

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


class KvBlocks:
    """The tensors that vLLM registered, by layer name; the same order as the model's layers.

    A block of a layer is one range of bytes, in whatever order of its axes: vLLM's layouts LBHNC, LBNHC, BLHNC and
    BLNHC. Raises `ConfigInvalid` for other layouts, and where layers differ.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        self.layer_of = {name: at for at, name in enumerate(caches)}
        self._tensors = list(caches.values())
        first = self._tensors[0]
        self.num_blocks, self.slab_bytes = first.shape[0], _slab_bytes(first)
        self.shape, self.strides = tuple(first.shape[1:]), tuple(first.stride()[1:])
        for name, tensor in caches.items():
            form = f"layer {name}: {tuple(tensor.shape)} with strides {tensor.stride()}"
            if not _is_dense(tensor[0]):
                raise ConfigInvalid(
                    f"{form}: a block of a layer is not one range of bytes. Start vLLM with "
                    "VLLM_KV_CACHE_LAYOUT=LBHNC, or LBNHC, BLHNC, BLNHC, whichever the attention backend supports",
                    field="kv_cache_layout",
                )
            if (tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])) != (self.shape, self.strides):
                raise ConfigInvalid(f"{form} differs from the first layer, {self.shape}", field="kv_cache_layout")
        self._rows = [_rows(tensor, self.slab_bytes) for tensor in self._tensors]
        on_host = first.device.type == "cpu"
        # numpy moves rows as memcpy does; torch's kernels for them are several times slower.
        self._host: list[Bytes] | None = [rows.numpy() for rows in self._rows] if on_host else None

    @property
    def device(self) -> torch.device:
        """Device of the blocks."""
        return self._tensors[0].device

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._tensors)

    def whole(self) -> tuple[torch.Tensor, int, Offsets] | None:
        """Return all of it as one range of bytes: (bytes, from a layer to the next, of each block in layer 0).

        None if layers are in several allocations, or at uneven distances: these are staged.
        """
        bases = [tensor.data_ptr() for tensor in self._tensors]
        storage = self._tensors[0].untyped_storage()
        steps = set(np.diff(bases).tolist())
        blocks = {tensor.stride(0) * tensor.element_size() for tensor in self._tensors}
        is_shared = all(tensor.untyped_storage().data_ptr() == storage.data_ptr() for tensor in self._tensors)
        if not is_shared or len(blocks) != 1 or len(steps) > 1 or any(step <= 0 for step in steps):
            return None
        memory = torch.empty(0, dtype=torch.uint8, device=self._tensors[0].device).set_(storage)
        offsets = bases[0] - storage.data_ptr() + np.arange(self.num_blocks, dtype=np.int64) * blocks.pop()
        return memory, int(steps.pop()) if steps else self.slab_bytes, offsets

    def take(self, layer: int, blocks: Sequence[int], into: Bytes) -> None:
        """Begin to copy one layer's slabs of `blocks` into (blocks, slab bytes) of host memory. See `CopyStream`."""
        if self._host is not None:
            np.take(self._host[layer], blocks, axis=0, out=into, mode="clip")  # which copies straight, unlike "raise"
            return
        rows = self._rows[layer]
        index = _index(blocks, rows.device)
        torch.from_numpy(into).copy_(rows.index_select(0, index), non_blocking=True)

    def put(self, layer: int, blocks: Sequence[int], out_of: Bytes) -> None:
        """Begin to copy (blocks, slab bytes) of host memory into one layer's slabs of `blocks`. See `CopyStream`."""
        if self._host is not None:
            self._host[layer][list(blocks)] = out_of
            return
        rows = self._rows[layer]
        index = _index(blocks, rows.device)
        rows.index_copy_(0, index, torch.from_numpy(out_of).to(rows.device, non_blocking=True))


def _index(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the numbers on the device. A copy that blocks would wait for all work of its stream."""
    return torch.tensor(blocks, dtype=torch.int64).to(device, non_blocking=True)


def kernel_of(layer: Any, spec: Any) -> str:
    """The attention backend of a layer, and the instruction set that CPU blocks are packed for."""
    backend: Any = getattr(layer, "attn_backend", None) or getattr(layer, "backend", None)
    name = str(backend.get_name()) if hasattr(backend, "get_name") else str(backend)
    impl = getattr(layer, "impl", None)
    return f"{name}/{type(impl).__name__}/{getattr(impl, 'isa', '') or _isa(name, spec)}"


def _isa(backend: str, spec: Any) -> str:
    if "CPU" not in backend.upper():
        return ""
    from vllm.v1.attention.backends import cpu_attn

    return str(cpu_attn._get_attn_isa(spec.dtype, spec.block_size, spec.head_size))


def _is_dense(block: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory, each in a place of its own."""
    filled = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


def _slab_bytes(tensor: torch.Tensor) -> int:
    return int(tensor[0].numel() * tensor.element_size())


def _rows(tensor: torch.Tensor, slab_bytes: int) -> torch.Tensor:
    """(blocks, slab bytes) over the same memory."""
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return torch.as_strided(
        flat, (tensor.shape[0], slab_bytes), (tensor.stride(0) * size, 1), tensor.storage_offset() * size
    )
