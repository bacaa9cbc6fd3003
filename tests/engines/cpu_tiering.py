"""vLLM's tiers on its CPU backend, for which it has no worker: memory is copied where a GPU's would be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class _CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Of one engine: its blocks, and its rows of the region that the tiers share with it."""

    def __init__(self, caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._per_chunk = blocks_per_chunk
        self._refs = caches.group_data_refs
        self._region = region
        self._ended: list[TransferResult] = []
        self._blocks = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors]
        self._rows = [
            region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk) for each in caches.tensors
        ]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, place in self._pairs(src_spec, dst_spec):
            place.copy_(block)
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, place in self._pairs(dst_spec, src_spec):
            block.copy_(place)
        return self._end(job_id)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """All have ended."""

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, True, 0, 1e-6))
        return True

    def _pairs(self, blocks: Any, chunks: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of every block and tensor: its bytes, and where they are in the region. A group may begin inside a chunk."""
        at = chunk_at = 0
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            inside = first % self._per_chunk
            for number, block in enumerate(blocks.block_ids[at : at + count], inside):
                chunk = chunks.block_ids[chunk_at + number // self._per_chunk]
                for ref in self._refs[group]:
                    tensor = self._blocks[ref.tensor_idx]
                    width, part = tensor.shape[1], number % self._per_chunk
                    yield tensor[block], self._rows[ref.tensor_idx][chunk][part * width : (part + 1) * width]
            at += count
            chunk_at += -(-(inside + count) // self._per_chunk) if count else 0


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's, with a worker for the CPU."""

    def _uses_shared_region(self) -> bool:
        return True

    _worker: Any

    def get_worker(self, kv_caches: Any) -> _CopyingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        worker: _CopyingWorker = self._worker
        return worker
