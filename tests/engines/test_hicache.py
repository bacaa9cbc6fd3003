"""SGLang's HiCache on Quire: the backend against SGLang's own host pool."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.model.errors import ConfigInvalid
from quire_tools.local import LocalCluster
from tests.engines import stubs
from tests.polling import until

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
stubs.install()
pytest.importorskip("sglang", reason="SGLang is not installed here: `make test-engines` installs it")
PAGE, PAGES, LAYERS = 32, 32, 4
KEYS = [hashlib.sha256(b"%d" % at).hexdigest() for at in range(8)]


def _pool(layout: str) -> Any:
    """Of 32 pages of 32 tokens."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    sizes: dict[str, Any] = {"page_size": PAGE, "dtype": torch.float32, "head_num": 2, "head_dim": 32}
    device = MHATokenToKVPool(
        size=PAGE * PAGES, layer_num=LAYERS, device="cpu", enable_memory_saver=False, enable_alt_stream=False, **sizes
    )
    capacity: dict[str, Any] = {"device_capacity_tokens": PAGE * PAGES, "start_layer": 0, "end_layer": LAYERS}
    host = MHATokenToKVPoolHost(
        device._mha_buffer_info(), 1.0, 0, PAGE, layout, pin_memory=False, device="cpu", **capacity
    )
    host.kv_buffer.copy_(torch.randn_like(host.kv_buffer))
    return host


class _HiCache:
    """A backend and its pool, as SGLang's controller uses them."""

    def __init__(self, gateway: str, pool: Any, rank: int = 0, **extra: Any) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

        from quire.integrations.sglang import QuireHiCache

        config = HiCacheStorageConfig(
            tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=False, model_name="m",
            extra_config={"interface_v1": 1, "gateway": gateway, "weights": "w", **extra},
        )  # fmt: skip
        self.pool, self.backend = pool, QuireHiCache(config)
        try:
            self.backend.register_mem_pool_host(pool)
            self.backend.register_mem_host_pool_v2(pool, PoolName.KV)
        except BaseException:
            self.backend.close()
            raise

    def exists(self, keys: list[str], before: list[str] | None) -> int:
        return int(self.backend.batch_exists(keys, _chain(before)))

    def set(self, keys: list[str], page: int, before: list[str] | None) -> bool:
        return all(self.backend.batch_set_v1(keys, _tokens(page, len(keys)), _chain(before)))

    def get(self, keys: list[str], page: int, before: list[str] | None) -> list[bool]:
        return list(self.backend.batch_get_v1(keys, _tokens(page, len(keys)), _chain(before)))

    def page(self, at: int) -> Any:
        return self.pool.get_data_page(at * PAGE, flat=True).clone()


def _tokens(page: int, count: int) -> Any:
    import torch

    return torch.arange(page * PAGE, (page + count) * PAGE)


def _chain(before: list[str] | None) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=before)


@pytest.fixture(params=["page_first_direct", "page_first", "layer_first"])
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("zero_copy", [True, False])
def test_pages_come_back_and_nothing_beside_them_changes(
    engine_cluster: LocalCluster, layout: str, zero_copy: bool
) -> None:
    """In two batches, as HiCache sends them; into other pages; and of a prefix as much as there is."""
    cache = _HiCache(engine_cluster.gateway_address, _pool(layout), zero_copy=zero_copy)
    try:
        assert cache.exists(KEYS, []) == 0 and cache.get(KEYS, 0, []) == [False] * 8
        assert cache.set(KEYS[:3], 0, []) and cache.set(KEYS[3:6], 3, KEYS[:3])
        wanted, kept = [cache.page(at) for at in range(6)], cache.page(16)
        assert cache.exists(KEYS, []) == 6 and cache.exists(KEYS[2:], KEYS[:2]) == 4
        assert cache.get(KEYS, 8, []) == [True] * 6 + [False] * 2
        assert all((cache.page(8 + at) == page).all() for at, page in enumerate(wanted))
        assert cache.get(KEYS[2:5], 20, KEYS[:2]) == [True] * 3
        assert all((cache.page(20 + at) == page).all() for at, page in enumerate(wanted[2:5]))
        assert (cache.page(16) == kept).all()
        assert cache.exists(KEYS[1:], []) == 0, "the same pages behind another prefix"
    finally:
        cache.backend.close()


def test_another_engine_finds_them_and_another_rank_or_layout_does_not(engine_cluster: LocalCluster) -> None:
    gateway, seen = engine_cluster.gateway_address, {}
    for name, pool, rank in (
        ("first", "page_first", 0),
        ("again", "page_first", 0),
        ("rank", "page_first", 1),
        ("layout", "layer_first", 0),
    ):
        cache = _HiCache(gateway, _pool(pool), rank)
        seen[name] = cache.exists(KEYS, [])
        if name == "first":
            assert cache.set(KEYS, 0, [])
        cache.backend.close()
    assert seen == {"first": 0, "again": 8, "rank": 0, "layout": 0}


def test_one_prompt_that_is_too_long_costs_others_nothing(engine_cluster: LocalCluster) -> None:
    """65,600 pages are more than a request may name: of them the first 65,536 are served."""
    cache = _HiCache(engine_cluster.gateway_address, _pool("page_first"))
    long = [hashlib.sha256(b"%d" % page).hexdigest() for page in range(65_600)]
    try:
        assert cache.set(KEYS, 0, [])
        for _ in range(3):
            assert cache.exists(long[65_500:], long[:65_500]) == 0
            assert cache.get(long[65_580:], 0, long[:65_580]) == [False] * 20
            assert not cache.set(long[65_580:], 0, long[:65_580])
            assert cache.exists(["zz" * 32], []) == 0, "no hash at all"
            assert cache.exists(KEYS, []) == 8
    finally:
        cache.backend.close()


def test_what_fails_is_a_miss_and_never_an_exception(engine_cluster: LocalCluster) -> None:
    """No parent, no prefix keys, a gateway that is away, a node that was killed."""
    away: dict[str, Any] = {"lookup_timeout_s": 0.3, "away_s": 0.2, "timeout_s": 2.0}
    cache = _HiCache(engine_cluster.gateway_address, _pool("page_first"), **away)
    try:
        assert not cache.set(KEYS[3:], 0, KEYS[:3])
        assert not cache.set(KEYS, 0, None) and cache.exists(KEYS, None) == 0
        time.sleep(0.5)
        assert cache.set(KEYS, 0, []) and cache.backend.exists(KEYS[0])
        engine_cluster.kill("gateway")
        assert cache.exists(KEYS, []) == 0 and not any(cache.get(KEYS, 8, [])) and not cache.set(KEYS, 0, [])
        engine_cluster.restart("gateway")
        until(lambda: cache.exists(KEYS, []) == 8, "it is used again", timeout_s=20)
        os.kill(engine_cluster.pid("storage-0"), signal.SIGKILL)
        assert not any(cache.get(KEYS, 8, []))
    finally:
        cache.backend.close()


def test_a_node_that_hangs_is_not_waited_for(engine_cluster: LocalCluster) -> None:
    cache = _HiCache(engine_cluster.gateway_address, _pool("page_first"), timeout_s=1.0)
    try:
        assert cache.set(KEYS, 0, [])
        kept = cache.page(8)
        os.kill(engine_cluster.pid("storage-0"), signal.SIGSTOP)
        began_s = time.monotonic()
        assert not any(cache.get(KEYS, 8, []))
        assert time.monotonic() - began_s < 10
        os.kill(engine_cluster.pid("storage-0"), signal.SIGCONT)
        time.sleep(0.5)
        assert (cache.page(8) == kept).all(), "what comes late comes to staging memory"
    finally:
        os.kill(engine_cluster.pid("storage-0"), signal.SIGCONT)
        cache.backend.close()


@pytest.mark.parametrize(
    ("extra", "said"),
    [({"interface_v1": 0}, "interface_v1"), ({"gatewy": "x"}, "gatewy"), ({"weights": ""}, "weights")],
)
def test_what_cannot_work_is_refused_at_start(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        _HiCache("127.0.0.1:1", _pool("page_first"), **extra)


def test_it_is_what_sglang_makes_of_its_configuration(engine_cluster: LocalCluster, tmp_path: Path) -> None:
    """By SGLang's factory, with the names that the documentation gives."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    extra = {
        "backend_name": "quire", "module_path": "quire.integrations.sglang", "class_name": "QuireHiCache",
        "interface_v1": 1, "gateway": engine_cluster.gateway_address, "weights": "w",
    }  # fmt: skip
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="m", extra_config=extra,
    )  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", config, _pool("page_first"))
    assert type(made).__name__ == "QuireHiCache"
    made.close()
