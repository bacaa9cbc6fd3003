"""Real vLLM with the connector: whatever happens to the cache, greedy tokens are those of vLLM alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.integrations.vllm.groups import Group, Kind
from quire.model.errors import PeerLost
from quire_bench.engines import arrivals
from quire_tools.local import LocalCluster
from tests.engines.engine import BLOCK, OTHER, PROMPT, Engine, engine, kill_at_first_load
from tests.polling import until

WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK
GROUP = Group(0, ("layers.0",), Kind.FULL, BLOCK, 4096)
PROMPTS = [PROMPT[: 300 + 64 * at] + [at + 3] * (20 + 7 * at) for at in range(8)]


@pytest.fixture(scope="session")
def expected(tiny_model: Path) -> dict[str, Any]:
    """By vLLM alone."""
    with engine(tiny_model) as alone:
        answers: dict[str, Any] = {"prompt": alone.tokens(PROMPT)[0], "other": alone.tokens(OTHER)[0]}
        answers["several"] = [answer for answer, _ in alone.batch(PROMPTS)]
        answers["long"] = alone.tokens(PROMPT, 80)[0]
        return answers


def _stored(quire: Engine, blocks: int) -> None:
    """Wait until so many are acknowledged."""
    seen = [0.0]

    def there() -> bool:
        seen[0] += quire.figures().get("stored_blocks", 0)
        return seen[0] >= blocks

    until(there, f"{blocks} blocks stored")


@pytest.fixture(params=["layerwise", "async"])
def load(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("zero_copy", ["always", "never"])
def test_tokens_are_the_same_cold_and_warm(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any], load: str, zero_copy: str
) -> None:
    """Also for a part of a prefix, one that ends inside a block, and what vLLM has itself is not loaded."""
    extra = {"load": load, "zero_copy": zero_copy}
    with engine(tiny_model, engine_cluster.gateway_address, extra) as quire:
        assert quire.tokens(PROMPT) == (expected["prompt"], 0)
        _stored(quire, WHOLE // BLOCK)
        quire.forget()
        assert quire.tokens(PROMPT) == (expected["prompt"], WHOLE)
        assert quire.figures()["loaded_blocks"] == WHOLE // BLOCK
        assert quire.tokens(PROMPT) == (expected["prompt"], WHOLE)
        assert "loaded_blocks" not in quire.figures(), "it was in vLLM's own cache"
        quire.forget()
        shared = 700 // BLOCK * BLOCK
        assert quire.tokens(OTHER) == (expected["other"], shared)
        assert quire.tokens(PROMPT) == (expected["prompt"], WHOLE)
        assert quire.figures()["loaded_blocks"] == WHOLE // BLOCK, "what vLLM has of it is not fetched again"


def test_another_engine_and_a_restart(tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any]) -> None:
    with engine(tiny_model, engine_cluster.gateway_address) as first:
        assert first.tokens(PROMPT) == (expected["prompt"], 0)
        _stored(first, WHOLE // BLOCK)
    with engine(tiny_model, engine_cluster.gateway_address) as second:
        assert second.tokens(PROMPT) == (expected["prompt"], WHOLE)


def test_what_is_generated_is_stored(tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any]) -> None:
    """The next turn of a conversation finds the answer of the one before."""
    with engine(tiny_model, engine_cluster.gateway_address) as quire:
        answer, _ = quire.tokens(PROMPT, 80)
        assert answer == expected["long"]
        whole = (len(PROMPT) + 79) // BLOCK * BLOCK
        _stored(quire, whole // BLOCK)
        quire.forget()
        assert quire.tokens([*PROMPT, *answer, 5, 6, 7])[1] == whole


def test_a_prompt_that_is_to_stay_is_retained(tiny_model: Path, engine_cluster: LocalCluster) -> None:
    """All of its whole blocks; without the hint, and for what is no time, none of them."""
    from vllm import SamplingParams

    states, retained = list[Any](), list[int]()

    def ask(prompt: list[int], hint: dict[str, Any]) -> tuple[Any, int]:
        """Its keys, and how many there are."""
        asked = SamplingParams(temperature=0, max_tokens=4, extra_args={"kv_transfer_params": hint} if hint else None)
        quire.llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        blocks = len(prompt) // BLOCK
        _stored(quire, blocks)
        return matching._blocks.keys(states[-1], matching._blocks.groups[0], blocks)[0], blocks

    with engine(tiny_model, engine_cluster.gateway_address) as quire:
        matching, client = quire.scheduler._matching, quire.scheduler._client
        namespace, finish, retain = (
            matching._blocks.namespaces[0][0],
            matching._carry_out_hints,
            client.asynchronous.retain,
        )

        async def noted(*arguments: Any, **options: Any) -> int:
            retained.append(await retain(*arguments, **options))
            return retained[-1]

        client.asynchronous.retain = noted

        def finishing(state: Any) -> None:
            states.append(state)
            finish(state)

        matching._carry_out_hints = finishing
        hints: list[dict[str, Any]] = [{}, {"quire": {"retain_s": "soon"}}, {"quire": {"retain_s": -1}}]
        for number, hint in enumerate(hints):
            keys, blocks = ask([number + 9, *OTHER], hint)
            assert not retained and client.evict(namespace, keys) == blocks
        keys, blocks = ask(PROMPT, {"quire": {"retain_s": 600}})
        until(lambda: blocks in retained, "it is retained")
        assert client.evict(namespace, keys) == 0
        assert client.end_retention(namespace, keys)
        assert client.evict(namespace, keys) == blocks


def test_eight_at_once_while_both_caches_evict(
    tiny_model: Path, tmp_path: Path, expected: dict[str, Any], load: str
) -> None:
    """vLLM has room for two or three of them, Quire's node for about half; chunked prefill and preemption included."""
    small: dict[str, Any] = {"kv_cache_memory_bytes": 5 << 20, "max_num_batched_tokens": 256, "max_model_len": 1024}
    settings = {"QUIRE_STORAGE_SLAB_BYTES": str(1 << 20), "QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": ""}
    with (
        LocalCluster(tmp_path / "c", arena_bytes=8 << 20, settings=settings) as cluster,
        engine(tiny_model, cluster.gateway_address, {"load": load}, **small) as quire,
    ):
        for _ in range(4):
            assert [answer for answer, _ in quire.batch(PROMPTS)] == expected["several"]
            quire.forget()
        assert quire.figures().get("loaded_blocks", 0) > 0


@pytest.mark.parametrize("zero_copy", ["async", "never"])
def test_a_node_killed_in_the_middle_costs_a_recompute(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any], load: str, zero_copy: str
) -> None:
    extra = {"load": load, "zero_copy": zero_copy, "timeout_s": 3.0}
    with engine(tiny_model, engine_cluster.gateway_address, extra) as quire:
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        _stored(quire, WHOLE // BLOCK)
        quire.forget()
        killed = kill_at_first_load(quire, engine_cluster)
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        assert killed and quire.figures()["failed_blocks"] == WHOLE // BLOCK
        quire.forget()
        assert quire.tokens(PROMPT)[0] == expected["prompt"], "and without a node it goes on"
        assert quire.tokens(OTHER)[0] == expected["other"]


def test_a_node_that_hangs_is_not_waited_for(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any], load: str
) -> None:
    """Staged loads are given up while the node may still write to the staging memory; that stays lent."""
    extra = {"load": load, "zero_copy": "never", "timeout_s": 1.0}
    pid = engine_cluster.pid("storage-0")
    with engine(tiny_model, engine_cluster.gateway_address, extra) as quire:
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        _stored(quire, WHOLE // BLOCK)
        quire.forget()
        free = quire.worker._loads[0]._pool.free_bytes
        start, stopped = quire.worker._loads[0].start, list[int]()

        def stop_first(plan: Any) -> None:
            if not stopped:
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
            start(plan)

        quire.worker._loads[0].start = stop_first
        try:
            began_s = time.monotonic()
            assert quire.tokens(PROMPT)[0] == expected["prompt"]
            assert time.monotonic() - began_s < 10
            assert quire.figures()["failed_blocks"] == WHOLE // BLOCK
            assert quire.worker._loads[0]._pool.free_bytes < free, "a silent node may still write there"
        finally:
            os.kill(pid, signal.SIGCONT)
        quire.forget()
        assert quire.tokens(PROMPT)[0] == expected["prompt"]


def test_quire_away_at_start_and_back_later(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any]
) -> None:
    """Serving waits for it once, for as long as a look-up may take; then it is asked again now and then."""
    extra = {"lookup_timeout_s": 0.3, "away_s": 0.2}
    engine_cluster.kill("gateway")
    with engine(tiny_model, engine_cluster.gateway_address, extra) as quire:
        assert quire.tokens(PROMPT) == (expected["prompt"], 0)
        figures = quire.figures()
        assert figures["failed_lookups"] == 1 and "stored_blocks" not in figures
        quire.forget()
        engine_cluster.restart("gateway")
        until(lambda: _warm(quire, expected["prompt"]), "Quire is used again", timeout_s=20)


def _warm(quire: Engine, expected: list[int]) -> bool:
    """Whether the prompt's blocks came from Quire."""
    quire.forget()
    answer, cached = quire.tokens(PROMPT)
    assert answer == expected
    return cached == WHOLE


def test_what_was_reset_is_not_found(tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any]) -> None:
    """After new weights vLLM resets its caches: nothing that the old ones computed comes back."""
    with engine(tiny_model, engine_cluster.gateway_address) as quire:
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        _stored(quire, WHOLE // BLOCK)
        quire.forget(connector=True)
        assert quire.tokens(PROMPT) == (expected["prompt"], 0)
        _stored(quire, WHOLE // BLOCK)
        quire.forget()
        assert quire.tokens(PROMPT) == (expected["prompt"], WHOLE), "what came after the reset is"


@pytest.mark.parametrize(
    ("extra", "settings", "said"),
    [
        ({}, {"kv_load_failure_policy": "fail"}, "recompute"),
        ({}, {"prefix_caching_hash_algo": "xxhash_cbor"}, "sha256_cbor"),
        ({}, {"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"laod": "async"}, {}, "laod"),
        ({"load": "never"}, {}, "layerwise"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    tiny_model: Path, extra: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    from quire.model.errors import ConfigInvalid

    with pytest.raises(ConfigInvalid, match=said), engine(tiny_model, "127.0.0.1:1", extra, **settings):
        pass


class _Lost:
    """Loads of which nothing arrives, for as long as it is in force."""

    def __init__(self, quire: Engine) -> None:
        self._loads = quire.worker._loads[0]

    def __enter__(self) -> None:
        async def lose(load: Any) -> set[int]:
            load.note(arrived=1)  # as if the node had died behind the first layer
            raise PeerLost("on purpose")

        self._deliver, self._loads._deliver = self._loads._deliver, lose

    def __exit__(self, *exc: object) -> None:
        self._loads._deliver = self._deliver


def test_the_comparison_of_tokens_sees_blocks_that_did_not_arrive(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any], load: str
) -> None:
    """The fault put back: what is missing is not reported, and the tokens are others."""
    with engine(tiny_model, engine_cluster.gateway_address, {"load": load}) as quire:
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        _stored(quire, WHOLE // BLOCK)
        quire.forget()
        for tensor in _caches(quire):
            tensor.zero_()
        with _Lost(quire):
            report, quire.worker._loads[0].missing = quire.worker._loads[0].missing, set
            assert quire.tokens(PROMPT)[0] != expected["prompt"]
            quire.worker._loads[0].missing = report
            report()
            quire.forget()
            assert quire.tokens(PROMPT)[0] == expected["prompt"]


@pytest.mark.parametrize("fault", [False, True])
def test_requests_that_share_a_failed_load_are_computed_and_stored_again(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any], fault: bool
) -> None:
    """Two at once: the second takes the first's blocks before they have arrived. `fault`: it stores behind them."""
    pair, answers = PROMPTS[6:], expected["several"][6:]
    with engine(tiny_model, engine_cluster.gateway_address, {"load": "layerwise"}) as quire:
        quire.tokens(PROMPT[:256])
        _stored(quire, 8)
        quire.forget()
        for tensor in _caches(quire):
            tensor.zero_()
        if fault:
            quire.scheduler._matching.settled = lambda told: None
            _never_unsettled(quire)
        with _Lost(quire):
            assert [answer for answer, _ in quire.batch(pair)] == answers
        time.sleep(1.0)  # both have been stored, or what the rule kept back was not
    with engine(tiny_model, engine_cluster.gateway_address) as other:
        again = other.batch(pair)
        assert [cached for _, cached in again] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in pair]
        assert ([answer for answer, _ in again] == answers) is not fault


@pytest.mark.parametrize("fault", [False, True])
def test_what_was_computed_behind_a_failed_load_is_not_stored(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any], fault: bool
) -> None:
    """`fault`: it is stored, as it would be without that rule, and another engine gets it."""
    with engine(tiny_model, engine_cluster.gateway_address, {"load": "layerwise"}) as quire:
        quire.tokens(PROMPT[:256])
        _stored(quire, 8)
        quire.forget()
        for tensor in _caches(quire):
            tensor.zero_()
        if fault:
            quire.scheduler._matching.settled = lambda told: None
            _never_unsettled(quire)
        with _Lost(quire):
            assert quire.tokens(PROMPT)[0] == expected["prompt"]
        if not fault:
            _stored(quire, WHOLE // BLOCK - 8)
    with engine(tiny_model, engine_cluster.gateway_address) as other:
        answer, cached = other.tokens(PROMPT)
        assert cached == WHOLE
        assert (answer == expected["prompt"]) is not fault


def _never_unsettled(quire: Engine) -> None:
    matching = quire.scheduler._matching
    store = matching._store

    def at_once(request_id: str, *rest: Any) -> Any:
        matching._unsettled.clear()
        return store(request_id, *rest)

    matching._store = at_once


def _caches(quire: Engine) -> list[Any]:
    return list(quire.worker._loads[0]._blocks._tensors)


def test_two_shards(tiny_model: Path, engine_cluster: LocalCluster, tmp_path: Path) -> None:
    """Tensor parallelism: each worker stores and loads the heads that it has."""
    from tests.engines.test_vllm_server import _server

    parallel = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    with _server(tiny_model, engine_cluster.gateway_address, tmp_path / "one", *parallel) as first:
        expected, cached = first.tokens(PROMPT)
        assert cached == 0
        until(lambda: _figure(first, "stored_blocks") == 2 * WHOLE // BLOCK, "both shards are stored", timeout_s=30)
    with _server(tiny_model, engine_cluster.gateway_address, tmp_path / "two", *parallel) as second:
        assert second.tokens(PROMPT) == (expected, WHOLE)
        until(lambda: _figure(second, "loaded_blocks") == 2 * WHOLE // BLOCK, "both shards were loaded", timeout_s=30)


def _figure(server: Any, name: str) -> float:
    """Workers report with a step: what ended after the last step shows after the next one."""
    server.tokens(PROMPT[:2])
    return float(server.figure(name))


@pytest.mark.parametrize("zero_copy", ["async", "never"])
def test_little_staging_memory_makes_it_slower_and_nothing_else(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any], load: str, zero_copy: str
) -> None:
    """Room for eight blocks of 31: they are stored over several steps; loads go straight, or take what fits.

    One step's blocks are still on their way when the next one's begin.
    """
    straight = load == "async" and zero_copy == "async"
    extra = {"load": load, "zero_copy": zero_copy, "staging_bytes": 8 * 4 * 16384}
    with engine(tiny_model, engine_cluster.gateway_address, extra) as quire:
        for _ in range(12):
            assert quire.tokens(PROMPT, 80)[0] == expected["long"]
            figures = quire.figures()
            assert "unstored_blocks" not in figures
            if figures.get("loaded_blocks", 0) == (WHOLE // BLOCK if straight else 4):
                break
            time.sleep(0.2)
            quire.forget()
        else:
            pytest.fail("it is never loaded whole")


def test_layerwise_loads_are_avoided_where_vllm_recomputes_wrongly() -> None:
    """vllm 49250: the V2 model runner, after a layerwise load that failed."""
    from quire.integrations.vllm.engine import asynchronous
    from quire.integrations.vllm.settings import Settings
    from quire.model.errors import ConfigInvalid

    plain = SimpleNamespace(async_scheduling=False)
    runners = {version: SimpleNamespace(use_v2_model_runner=version == 2, scheduler_config=plain) for version in (1, 2)}
    by_itself, layerwise = Settings(gateway="g:1"), Settings(gateway="g:1", load="layerwise")
    assert [asynchronous(runners[version], by_itself, [GROUP]) for version in (1, 2)] == [True, True]
    assert not asynchronous(runners[1], layerwise, [GROUP])
    with pytest.raises(ConfigInvalid, match="49250"):
        asynchronous(runners[2], layerwise, [GROUP])
    ahead = SimpleNamespace(use_v2_model_runner=False, scheduler_config=SimpleNamespace(async_scheduling=True))
    with pytest.raises(ConfigInvalid, match="asynchronous scheduling"):
        asynchronous(ahead, layerwise, [GROUP])
    guessing = SimpleNamespace(use_v2_model_runner=False, scheduler_config=plain, speculative_config=object())
    with pytest.raises(ConfigInvalid, match="speculative decoding"):
        asynchronous(guessing, layerwise, [GROUP])
    window = replace(GROUP, kind=Kind.WINDOW, reach=64)
    for groups in ([GROUP, GROUP], [window]):
        with pytest.raises(ConfigInvalid, match="the whole prefix"):
            asynchronous(runners[1], layerwise, groups)


def test_the_runner_that_this_vllm_chose_is_told_by_its_configuration(tiny_model: Path) -> None:
    """The detection reads what vLLM itself goes by."""
    with engine(tiny_model) as alone:
        config = alone.llm.llm_engine.vllm_config
        scheduler = alone.llm.llm_engine.engine_core.engine_core.scheduler
        assert config.use_v2_model_runner is scheduler.use_v2_model_runner


def test_what_would_come_later_than_computing_it_is_computed(
    tiny_model: Path, tmp_path: Path, expected: dict[str, Any], load: str
) -> None:
    """A link of 1 MB/s: the first loads are given up on their way, later ones are not begun but for a few blocks."""
    shaped = {"QUIRE_SCHEDULER_LINKS": "default=1000000", "QUIRE_STORAGE_LINK_BYTES_PER_S": "1000000"}
    with (
        LocalCluster(tmp_path / "c", arena_bytes=128 << 20, settings=shaped) as cluster,
        engine(tiny_model, cluster.gateway_address, {"load": load, "cut_off": True}) as quire,
    ):
        for at in range(4):  # what computing costs here
            quire.tokens([at + 9, *PROMPT])
        assert quire.tokens(PROMPT)[0] == expected["prompt"]
        _stored(quire, 5 * (WHOLE // BLOCK))
        figures: dict[str, float] = {}
        for _ in range(6):
            quire.forget()
            assert quire.tokens(PROMPT)[0] == expected["prompt"]
            for name, value in quire.figures().items():
                figures[name] = figures.get(name, 0) + value
        assert figures["late_blocks"] >= WHOLE // BLOCK, figures
        assert figures["recomputed_blocks"] >= WHOLE // BLOCK, figures


def test_engines_with_other_longest_sequences_share(
    tiny_model: Path, engine_cluster: LocalCluster, expected: dict[str, Any]
) -> None:
    with engine(tiny_model, engine_cluster.gateway_address) as first:
        assert first.tokens(PROMPT) == (expected["prompt"], 0)
        _stored(first, WHOLE // BLOCK)
    with engine(tiny_model, engine_cluster.gateway_address, max_model_len=1536) as second:
        assert second.tokens(PROMPT) == (expected["prompt"], WHOLE)


def test_requests_that_arrive_at_random_are_all_answered(tiny_model: Path) -> None:
    """The load of `quire bench engines --arrivals`: the answers are those to the prompts one by one."""
    _, (load,) = arrivals.loads([20.0], 6, 96, 32)
    with engine(tiny_model) as alone:
        served = arrivals.serve(alone, load)
        assert [served.answers[f"20.0-{number}"] for number in range(6)] == [
            alone.tokens(prompt)[0] for prompt in load.prompts
        ]
    assert len(served.first_s) == 6 and len(served.between_s) == 6 * 7 and served.took_s >= load.arrivals_s[-1]
