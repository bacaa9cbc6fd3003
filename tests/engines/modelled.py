"""A fake model and fake workers for tests of vLLM's engine core, scheduler and block tables.

They cover decode context parallelism, latents and quantized caches, which no build of vLLM runs on this CPU. A layer
stores for each token a digest of the tokens up to it, the layer, the head and the weights. The next token is a digest
of the prompt's rows in the workers' blocks. One wrong byte changes the token.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import DeepseekV2Config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from quire_tools.engines.vllm import Engine, any_vllm
from tests.polling import until

_LAYERS: Final = ("layers.0", "layers.1")
_HEAD_SIZE: Final = 32
_VOCABULARY: Final = 250


class _Layer(AttentionLayerBase):  # type: ignore[misc]
    def get_attn_backend(self) -> Any:
        return None

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return None


class ModelledWorker:
    """A rank with its blocks and its half of the connector."""

    def __init__(self, config: Any, rank: int) -> None:
        self.config = copy.copy(config)
        self.config.parallel_config = copy.copy(config.parallel_config)
        self.config.parallel_config.rank = rank
        self.rank = rank
        self.connector: Any = None
        self.blocks: dict[str, np.ndarray[Any, Any]] = {}

    @property
    def head(self) -> int:
        """The first head of the model that this rank keeps; with latent attention all ranks keep the one."""
        parallel, model = self.config.parallel_config, self.config.model_config
        if model.use_mla:
            return 0
        return int(self.rank * model.get_total_num_kv_heads() // parallel.tensor_parallel_size)

    def specs(self) -> dict[str, Any]:
        return dict.fromkeys(_LAYERS, self.spec())

    def spec(self) -> Any:
        """Describe an attention layer with one head for each rank."""
        cache = self.config.cache_config
        kind = MLAAttentionSpec if self.config.model_config.use_mla else FullAttentionSpec
        spec = kind(
            block_size=cache.block_size,
            num_kv_heads=1,
            head_size=_HEAD_SIZE,
            dtype=STR_DTYPE_TO_TORCH_DTYPE.get(cache.cache_dtype, torch.float32),
            kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
        )
        return TritonAttentionBackend.customize_spec(spec)  # with room for scales, where tokens have their own

    def start(self, cache: Any) -> None:
        self.config.adjust_dcp_kv_cache_interleave_size(cache)  # as vLLM's workers do before they make a connector
        self.config.compilation_config.static_forward_context.update({name: _Layer() for name in _LAYERS})
        spec = self.spec()
        width = spec.state_content_size_bytes // spec.dtype.itemsize
        shape = (cache.num_blocks, 1, spec.block_size, width)
        tensors = {name: torch.zeros(shape, dtype=spec.dtype) for name in _LAYERS}
        self.blocks = {name: tensor.view(torch.uint8).numpy() for name, tensor in tensors.items()}
        if self.config.kv_transfer_config is not None:
            self.connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cache)
            self.connector.register_kv_caches(tensors)

    def place_of(self, position: int) -> tuple[int, int] | None:
        """Index into the request's blocks, and the row there; None for a token that another rank keeps.

        A copy of vLLM's `ComputeSlotMappingKernel`, which does not run on a CPU.
        """
        parallel = self.config.parallel_config
        ranks, interleave = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
        block, inside = divmod(position, self.config.cache_config.block_size * ranks)
        if inside // interleave % ranks != self.rank % ranks:
            return None
        return block, inside // (ranks * interleave) * interleave + inside % interleave


def _row(prefix: bytes, layer: str, head: int, length: int) -> bytes:
    digest = hashlib.sha512(prefix + f"{layer} {head}".encode()).digest()
    return (digest * (length // len(digest) + 1))[:length]


class ModelledExecutor(Executor):  # type: ignore[misc]
    """Runs the ranks in turn."""

    def _init_executor(self) -> None:
        # For latent attention on a CPU vLLM switches it off.
        self.cache_config.enable_prefix_caching = True
        self.workers = [ModelledWorker(self.vllm_config, rank) for rank in range(self.parallel_config.world_size)]
        self._requests: dict[str, tuple[list[int], list[int]]] = {}

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        answers: dict[str, Callable[[ModelledWorker], Any]] = {
            "get_kv_cache_spec": lambda worker: worker.specs(),
            "get_supported_kv_cache_layouts": lambda _: ["LBNHC"],
            "set_kv_cache_layout": lambda _: None,
            "determine_available_memory": lambda _: 64 << 20,
            "initialize_from_config": lambda worker: worker.start(args[0][worker.rank]),
            "compile_or_warm_up_model": lambda _: CompilationTimes(0.0, 0.0),
            "get_kv_connector_handshake_metadata": lambda worker: {
                (0, worker.rank): worker.connector.get_handshake_metadata()
            },
            "get_supported_tasks": lambda _: ("generate",),
            "reset_encoder_cache": lambda _: None,
            "reset_mm_cache": lambda _: None,
            "shutdown": lambda worker: worker.connector.shutdown() if worker.connector is not None else None,
        }
        return [answers[method](worker) for worker in self.workers]

    def check_health(self) -> None:
        pass

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self._take_note(scheduler_output)
        meta = scheduler_output.kv_connector_metadata
        connectors = [worker.connector for worker in self.workers] if meta is not None else []
        for connector in connectors:
            connector.bind_connector_metadata(meta)
            connector.start_load_kv(None)
        sampled = {}
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            tokens, _ = self._requests[request_id]
            end = self._computed[request_id] + count
            self._compute(request_id, self._computed[request_id], end)
            sampled[request_id] = [self._next(request_id, end)] if end >= len(tokens) else []
            tokens.extend(sampled[request_id])
        names = list(sampled)
        outputs = [
            ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, list(sampled.values()))
            for _ in self.workers
        ]
        for connector, output in zip(connectors, outputs, strict=False):
            output.kv_connector_output = _end_step(connector, scheduler_output)
        result = self.kv_output_aggregator.aggregate(outputs) if connectors else outputs[0]
        done: Future[Any] = Future()
        done.set_result(result)
        return done if non_block else result

    def _take_note(self, step: Any) -> None:
        """Keep each request's tokens and blocks, and where this step begins."""
        self._computed: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self._requests[new.req_id] = list(new.prompt_token_ids), list(new.block_ids[0])
            self._computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            _, own = self._requests[request_id]
            if request_id in cached.resumed_req_ids:
                own.clear()
            own.extend(blocks[0] if blocks is not None else ())
            self._computed[request_id] = computed

    def _compute(self, request_id: str, begin: int, end: int) -> None:
        tokens, blocks = self._requests[request_id]
        weights = b"".join(sorted(path.read_bytes() for path in Path(self.model_config.model).glob("*model*")))
        prefix = hashlib.sha512(weights + np.array(tokens[:begin], np.int64).tobytes())
        for position in range(begin, end):
            prefix.update(tokens[position].to_bytes(8, "little"))
            for worker, layer, row in self._rows(blocks, position):
                row[:] = np.frombuffer(_row(prefix.digest(), layer, worker.head, len(row)), np.uint8)

    def _next(self, request_id: str, end: int) -> int:
        _, blocks = self._requests[request_id]
        digest = hashlib.sha256()
        for position in range(end):
            for _, _, row in self._rows(blocks, position):
                digest.update(row)
        return int.from_bytes(digest.digest()[:4], "little") % _VOCABULARY + 2

    def _rows(self, blocks: Sequence[int], position: int) -> Any:
        """Yield (worker, layer, bytes) of each rank that keeps the token."""
        for worker in self.workers:
            place = worker.place_of(position)
            if place is not None:
                for layer, cache in worker.blocks.items():
                    yield worker, layer, cache[blocks[place[0]], 0, place[1]]


def _end_step(connector: Any, step: Any) -> KVConnectorOutput:
    """End the step of a connector, in the order of vLLM's `KVConnectorModelRunnerMixin`."""
    for layer in _LAYERS:
        connector.wait_for_layer_load(layer)
        connector.save_kv_layer(layer, None, None)
    connector.wait_for_save()
    results = connector.get_transfer_results(step.finished_req_ids)
    output = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
        kv_connector_stats=connector.get_kv_connector_stats(),
        kv_connector_worker_meta=connector.build_connector_worker_meta(),
    )
    connector.clear_connector_metadata()
    return output


@contextmanager
def modelled_engine(model: Path, gateway: str, *, name: str = "any", **settings: Any) -> Iterator[Engine]:
    """vLLM with `ModelledExecutor`, and Quire unless `gateway` is empty. Settings as for `vllm.LLM`."""
    transfer = KVTransferConfig(
        kv_connector="QuireConnector",
        kv_connector_module_path="quire.integrations.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"gateway": gateway, "cut_off": False, "model": name},
    )
    settings |= {"distributed_executor_backend": ModelledExecutor, "skip_tokenizer_init": True}
    with any_vllm(model, transfer if gateway else None, **settings) as engine:
        try:
            yield engine
        finally:
            if gateway:
                engine.scheduler.shutdown()


def until_stored(engine: Engine, prompt: Sequence[int]) -> None:
    """Wait until Quire has all of a prompt's blocks; vLLM takes note of it in its next steps."""
    unit = engine.scheduler._matching._unit

    def is_stored() -> bool:
        engine.tokens([3, 4, 5], 1)
        engine.forget()
        return bool(engine.tokens(prompt, 1)[1] >= (len(prompt) - 1) // unit * unit)

    until(is_stored, "the prompt's blocks are stored")
    engine.forget()


def latent_model(folder: Path) -> Path:
    """Write the configuration of a model with latent attention, and something for weights."""
    DeepseekV2Config(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=512,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        architectures=["DeepseekV2ForCausalLM"],
    ).save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    return folder
