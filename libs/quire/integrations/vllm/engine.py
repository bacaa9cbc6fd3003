"""The configuration of vLLM: whether the connector serves it, and the consequences."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import huggingface_hub
import vllm
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from quire.integrations.vllm.contents import ContentNames
from quire.integrations.vllm.groups import Group, Kind
from quire.integrations.vllm.settings import Settings
from quire.integrations.weights import processor_digest, rope_depends_on_length, weights_name
from quire.model.errors import ConfigInvalid

_DIGEST_BYTES: Final = 32
_STAGING_MIN: Final = 32 << 20
_IMAGE_LIBRARIES: Final = ("transformers", "pillow", "torchvision", "opencv-python-headless")


def groups_of(kv_cache_config: Any, context_ranks: int = 1) -> tuple[Group, ...]:
    """Return the groups of a model's layers. Raises `ConfigInvalid` for state that QuireConnector does not serve.

    Of `context_ranks` (--decode-context-parallel-size) each keeps its part of the tokens of a block.
    """
    groups = kv_cache_config.kv_cache_groups
    if not all(group.layer_names for group in groups):
        raise ConfigInvalid(
            "a stage has no layer of some kind: not supported. Give another number of stages, or other layers to each",
            field="pipeline_parallel_size",
        )
    unserved = [group for group in groups if _kind_of(group.kv_cache_spec) is None or not group.enable_kv_transfer]
    if unserved:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in unserved)
        raise ConfigInvalid(
            f"this model's cache has {kinds}; QuireConnector serves full attention, MLA, sliding windows, chunked "
            "attention, and states that vLLM keeps where blocks end (--mamba-cache-mode align, without speculative "
            "decoding). vLLM's own offloading with a QuireTier may serve others",
            field="kv_connector",
        )
    return tuple(_group_of(number, group, context_ranks) for number, group in enumerate(groups))


def _group_of(number: int, group: Any, context_ranks: int) -> Group:
    spec = group.kv_cache_spec
    kind = _kind_of(spec)
    assert kind is not None, "served"
    return Group(
        number=number,
        layers=tuple(group.layer_names),
        kind=kind,
        block_tokens=resolve_dcp_kv_block_size(spec, context_ranks),
        block_bytes=int(spec.page_size_bytes) * len(group.layer_names),
        reach=_reach(spec, kind),
    )


def _reach(spec: Any, kind: Kind) -> int:
    if kind is Kind.WINDOW:
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if kind is Kind.CHUNKED else 0


def _kind_of(spec: Any) -> Kind | None:
    """Return the kind of a group's layers; None for kinds that QuireConnector does not serve."""
    if type(spec) is MambaSpec:
        aligned = spec.mamba_cache_mode == "align" and not spec.num_speculative_blocks
        return Kind.STATE if aligned else None
    kinds = {FullAttentionSpec: Kind.FULL, MLAAttentionSpec: Kind.FULL}
    kinds |= {SlidingWindowSpec: Kind.WINDOW, ChunkedLocalAttentionSpec: Kind.CHUNKED}
    return kinds.get(type(spec))


def check(config: Any, settings: Settings, transfer: Any) -> None:
    """Check the configuration. Raises `ConfigInvalid`, naming vLLM's flag and the value that it needs."""
    if transfer.kv_load_failure_policy != "recompute" and not settings.allow_failing:
        raise ConfigInvalid(
            f"is {transfer.kv_load_failure_policy!r}: a request whose blocks did not arrive would fail. Set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config, or allow_failing in its extra config',
            field="kv_load_failure_policy",
        )
    if getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        raise ConfigInvalid(
            "more than 1 is not supported by QuireConnector; --decode-context-parallel-size is",
            field="prefill_context_parallel_size",
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigInvalid(
            "scales that are computed from the first prompt differ by engine; use those of the checkpoint",
            field="calculate_kv_scales",
        )
    if settings.zero_copy != "never" and getattr(config.model_config, "enable_sleep_mode", False):
        raise ConfigInvalid(
            "an engine that sleeps unmaps its blocks, and storage nodes may write into them where zero_copy is "
            f"{settings.zero_copy!r}; leave out --enable-sleep-mode, or set zero_copy to never",
            field="enable_sleep_mode",
        )
    check_contents(config)


def check_contents(config: Any) -> None:
    """Check that vLLM's names of blocks are those of their contents. Raises `ConfigInvalid`."""
    algorithm = config.cache_config.prefix_caching_hash_algo
    if not str(algorithm).startswith("sha256"):
        raise ConfigInvalid(
            f"{algorithm}: keys have {_DIGEST_BYTES} bytes, and strangers must not find two prompts with one of them; "
            "give --prefix-caching-hash-algo sha256_cbor",
            field="prefix_caching_hash_algo",
        )
    if not config.cache_config.enable_prefix_caching:
        raise ConfigInvalid("is off: blocks have no hashes then", field="enable_prefix_caching")


def asynchronous(config: Any, settings: Settings, groups: Sequence[Group]) -> bool:
    """Refuse, by `ConfigInvalid`, layerwise loads where vLLM would keep a token that was computed behind a failed one.

    Its V2 model runner recomputes wrongly (vllm 49250); with asynchronous scheduling the next step is planned before
    the failure is reported, likewise with pipelines; with speculative decoding the report comes a step too late.
    """
    pipeline = getattr(getattr(config, "parallel_config", None), "pipeline_parallel_size", 1)
    unfit = {
        "vLLM's V2 model runner (vllm 49250)": getattr(config, "use_v2_model_runner", False),
        "asynchronous scheduling": getattr(config.scheduler_config, "async_scheduling", False),
        "pipeline parallelism": pipeline > 1,
        "speculative decoding": getattr(config, "speculative_config", None) is not None,
        "layers that do not keep the whole prefix": not resumes_behind_failures(groups),
    }
    names = ", ".join(name for name, is_set in unfit.items() if is_set)
    if settings.load == "layerwise" and names:
        raise ConfigInvalid(
            f"layerwise loads that fail are recomputed wrongly with {names}; use async",
            field="kv_connector_extra_config.load",
        )
    return settings.load != "layerwise"


def resumes_behind_failures(groups: Sequence[Group]) -> bool:
    """Return whether vLLM can compute a request from its first failed block on.

    Layers with windows would read blocks in front of it that were neither loaded nor computed; and for models with
    several groups vLLM accepts failed requests only, not blocks. Such requests are computed from their start.
    """
    return [group.kind for group in groups] == [Kind.FULL]


def hash_tokens(config: Any, kv_cache_config: Any) -> int:
    """Return the number of tokens in each of vLLM's hashes."""
    _, tokens = resolve_kv_cache_block_sizes(kv_cache_config, config)
    return int(tokens)


def staging_bytes(settings: Settings, config: Any, groups: Sequence[Group]) -> int:
    """Return the bytes as set, or twice those of a step or a request: one is stored while the next computes."""
    if settings.staging_bytes:
        return settings.staging_bytes
    limits = config.scheduler_config
    tokens = max(limits.max_num_batched_tokens, config.model_config.max_model_len)
    computed = sum((tokens // group.block_tokens + limits.max_num_seqs) * group.block_bytes for group in groups)
    machine = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(config.parallel_config.tensor_parallel_size)
    )
    return max(_STAGING_MIN, min(2 * int(computed), machine // 8))


def staged_bytes_max(settings: Settings, config: Any, groups: Sequence[Group]) -> int:
    """Return the part of staging memory that one request may have for loads, and again for stores."""
    return staging_bytes(settings, config, groups) // 2


def content_names(config: Any, kv_cache_config: Any) -> ContentNames:
    """Make the names of adapters and images. With images in shared memory the scheduler does not have their data."""
    ranks = config.parallel_config.decode_context_parallel_size
    tokens = sum(
        kv_cache_config.num_blocks * resolve_dcp_kv_block_size(group.kv_cache_spec, ranks)
        for group in kv_cache_config.kv_cache_groups
    )
    media = config.model_config.multimodal_config
    return ContentNames(
        media_max=tokens + config.scheduler_config.encoder_cache_size,
        media_readable=media is not None and media.mm_processor_cache_type != "shm",
    )


def weights_of(model: Any) -> str:
    """Return the name of a model's weights. Raises `ConfigInvalid` where it would be of other weights too."""
    return weights_name(model.model, getattr(model.hf_config, "_commit_hash", None) or _cached_commit(model))


def _cached_commit(model: Any) -> str | None:
    """Return the commit of a hub's model whose files vLLM has loaded from the local cache."""
    cached = None
    if not Path(model.model).exists():
        with contextlib.suppress(ValueError):  # not the name of a repository
            cached = huggingface_hub.try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(cached).parent.name if isinstance(cached, str) else None


def engine_of(config: Any) -> dict[str, Any]:
    """Return the facts, besides the workers' formats, that make blocks differ, or the same tokens hash differently."""
    model, cache = config.model_config, config.cache_config
    described = model.hf_config.to_dict()
    return {
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "quantization": str(model.quantization),
        "model dtype": str(model.dtype),
        "hash": str(cache.prefix_caching_hash_algo),
        "config": _without_paths(described),
        "max_model_len": model.max_model_len if rope_depends_on_length(described) else 0,
        "inputs": _inputs(model) if model.is_multimodal_model else "",
        "load format": str(config.load_config.load_format),
        "adapters": str(config.lora_config.lora_dtype) if config.lora_config is not None else "",
        "seed": model.seed if str(config.load_config.load_format) == "dummy" else 0,
    }


def _inputs(model: Any) -> dict[str, str]:
    """Name the code and settings that make a model's inputs from an image, of which vLLM hashes the content alone."""
    arguments = model.multimodal_config
    return {
        "processor": processor_digest(model.model),
        "arguments": json.dumps(
            [arguments.mm_processor_kwargs, arguments.media_io_kwargs], sort_keys=True, default=str
        ),
        "libraries": ", ".join(f"{name} {_version(name)}" for name in _IMAGE_LIBRARIES),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _without_paths(config: dict[str, Any]) -> str:
    """The model's configuration with all overrides, the same wherever it lies."""
    return json.dumps(
        {name: value for name, value in config.items() if "path" not in name}, sort_keys=True, default=str
    )
