"""`quire bench engines`: time to first token of a real vLLM on the CPU, with prefixes computed, local, and from Quire.

The same prompts for all, and a model of random weights: conversations that share a prefix and end differently. A first
token is one request for one token, alone. "restart" is a new engine on the same cluster: what vLLM kept is gone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.console import Console

from quire.model.errors import InvalidRequest
from quire_bench.engines import arrivals, serving
from quire_tools.engines.models import FAMILIES, make_model, settings_of
from quire_tools.engines.vllm import BLOCK, Engine, require_vllm, vllm_engine
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, median, percentile

_SETTLE_S: Final = 20.0
_TITLES: Final = {
    "computed": "vLLM alone, computed",
    "computed again": "vLLM alone, computed: the prompts of the restart",
    "local": "vLLM alone, in its own prefix cache",
}


@dataclass(slots=True)
class _Seen:
    """Seconds to the first token, and tokens of the prompts that were cached."""

    seconds: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Of each conversation: its first turn, and two later ones; `shared` tokens of all are the same."""

    first: list[list[int]]
    later: list[list[int]]
    again: list[list[int]]
    shared: int


def _prompts(count: int, tokens: int, hit: float, *, grow: bool) -> _Prompts:
    """Draw conversations. `grow`: the later turns continue all of the first one."""
    shared = max(BLOCK, int(tokens * hit) // BLOCK * BLOCK)
    draw = np.random.default_rng(5)
    first = [draw.integers(2, 258, tokens).tolist() for _ in range(count)]
    later, again = (
        [[*each[:shared], *draw.integers(2, 258, tokens - shared).tolist()] for each in first] for _ in range(2)
    )
    return _Prompts([prompt[:shared] for prompt in first] if grow else first, later, again, shared)


def _ask(engine: Engine, prompts: Sequence[list[int]], before_each: Callable[[], None] = lambda: None) -> _Seen:
    seen = _Seen()
    for prompt in prompts:
        before_each()
        started = time.perf_counter()
        answer, cached = engine.tokens(prompt, 1)
        seen.seconds.append(time.perf_counter() - started)
        seen.cached.append(cached)
        seen.answers.append(answer)
    return seen


@contextmanager
def stored(engine: Engine, blocks: int) -> Iterator[None]:
    """Returns once so many more blocks are acknowledged than before, or after a while."""
    stores = engine.worker._stores[-1]  # of a hybrid model the group with full attention
    count, total = stores._count, [0.0]

    def counting(name: str, value: float) -> None:
        total[0] += value if name == "stored_blocks" else 0
        count(name, value)

    stores._count = counting
    yield
    deadline = time.monotonic() + _SETTLE_S
    while total[0] < blocks and time.monotonic() < deadline:
        time.sleep(0.02)
    stores._count = count


def _with_quire(model: Path, gateway: str, load: str, prompts: _Prompts, settings: dict[str, Any]) -> dict[str, _Seen]:
    extra = {"load": load, "cut_off": False}
    seen: dict[str, _Seen] = {}
    with vllm_engine(model, gateway, extra, **settings) as engine:
        size = engine.scheduler._groups[-1].block_tokens
        with stored(engine, sum(len(prompt) // size for prompt in prompts.first)):
            seen["cold"] = _ask(engine, prompts.first)
        seen["warm"] = _ask(engine, prompts.later, engine.forget)
    with vllm_engine(model, gateway, extra, **settings) as engine:
        engine.tokens(list(range(2, 2 + 2 * BLOCK)), 1)  # what an engine does once
        seen["restart"] = _ask(engine, prompts.again)
    return seen


def _alone(model: Path, prompts: _Prompts, settings: dict[str, Any]) -> dict[str, _Seen]:
    """`computed`: nothing is cached; `local`: in vLLM's own prefix cache."""
    seen: dict[str, _Seen] = {}
    with vllm_engine(model, **settings) as engine:
        engine.tokens(list(range(2, 2 + 2 * BLOCK)), 1)
        seen["computed"] = _ask(engine, prompts.later, engine.forget)
        seen["computed again"] = _ask(engine, prompts.again, engine.forget)
        local = _Seen()
        for first, later in zip(prompts.first, prompts.later, strict=True):
            engine.forget()
            engine.tokens(first, 1)
            one = _ask(engine, [later])
            local.seconds += one.seconds
            local.cached += one.cached
            local.answers += one.answers
        seen["local"] = local
    return seen


def run(tokens: int, hit: float, prompts: int, layers: int, hidden: int, family: str = "llama") -> Report:
    """Measure one family of models.

    Raises:
        InvalidRequest: vLLM is not installed, or an answer differs from the computed one.
    """
    baseline = {"name": f"vLLM {require_vllm()} computing the whole prompt, same run", "unit": "ms"}
    report = Report("engines", baseline, tall=True)
    # vLLM keeps states at the ends of prompts only.
    turns = _prompts(prompts, tokens, hit, grow=family == "qwen3-next")
    heads = hidden // 64
    with tempfile.TemporaryDirectory(prefix="quire-engines-") as name, Console().status("a model of random weights"):
        folder = Path(name)
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": max(1, heads // 4)}
        model = make_model(folder / "model", family=family, window=512, **sizes)
        per_token = layers * 2 * max(1, heads // 4) * 64 * 4
        room = max(64 << 20, 2 * prompts * tokens * per_token)
        settings = {"max_model_len": tokens + BLOCK, "kv_cache_memory_bytes": room, **settings_of(family)}
        measured = _alone(model, turns, settings)
        for load in ("layerwise", "async") if family in ("llama", "mixtral") else ("async",):
            with LocalCluster(folder / load, arena_bytes=2 * room, drive_bytes=2 * room) as cluster:
                ours = _with_quire(model, cluster.gateway_address, load, turns, settings)
            measured |= {f"Quire, {load}, {when}": ours[when] for when in ("warm", "restart")}
            measured[f"Quire, {load}: the first time, nothing stored"] = ours["cold"]
    _fill(report, measured, turns, per_token)
    report.notes.append(f"a model of the family {family}, of random weights")
    return report


def _fill(report: Report, seen: dict[str, _Seen], asked: _Prompts, per_token: int) -> None:
    base = median([*seen["computed"].seconds, *seen["computed again"].seconds])
    for name, each in seen.items():
        expected = seen["computed again" if "restart" in name else "computed"].answers
        if "first time" not in name and "again" not in name and each.answers != expected:
            raise InvalidRequest(f"{name}: other tokens than vLLM computes alone", field="engine")
        measured = {
            "p50 ms": median(each.seconds) * 1e3,
            "p99 ms": percentile(each.seconds, 0.99) * 1e3,
            "cached tokens": float(np.mean(each.cached)),
        }
        title = _TITLES.get(name, name)
        report.rows.append(Row({"what": title}, measured, base * 1e3, base / median(each.seconds)))
    tokens = len(asked.later[0])
    report.notes += [
        f"{len(asked.later)} prompts of {tokens} tokens, {asked.shared} shared; one token each, one after the other",
        f"{per_token} bytes of KV a token; the tokens are the same in every row but the first-time ones, or this fails",
        "vLLM on the CPU, one thread; its own offloading does not run on one, LMCache and SGLang were not compared",
    ]


def command(
    tokens: Annotated[int, typer.Option(help="of each prompt")] = 2048,
    hit: Annotated[float, typer.Option(help="share of it that was seen before")] = 0.875,
    prompts: Annotated[int, typer.Option(help="how many")] = 8,
    layers: Annotated[int, typer.Option(help="of the model of random weights")] = 8,
    hidden: Annotated[int, typer.Option(help="its width; heads of 64")] = 512,
    model: Annotated[str, typer.Option(help=f"family of the model: {', '.join(FAMILIES)}")] = "llama",
    against: Annotated[
        bool, typer.Option("--against", help="requests beside vLLM's disk connector and LMCache")
    ] = False,
    adapters: Annotated[int, typer.Option(help="with --against: LoRA adapters that conversations use in turn")] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="with --against: requests of this trace (Mooncake's format)")
    ] = None,
    requests: Annotated[int, typer.Option(help="with --against or --arrivals: how many")] = 32,
    rates: Annotated[
        str, typer.Option("--arrivals", help="requests per second that arrive at random, one or several rates")
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Time to first token of a real vLLM: prefixes computed, in its own cache, and from Quire, also after a restart."""
    if rates:
        require_vllm()
        numbers = [float(rate) for rate in rates.split(",")]
        new = max(1, round(tokens * (1 - hit)))
        arrivals.run(numbers, requests, tokens, new, model).show(json_file, plot)
        return
    if against:
        require_vllm()
        if not 0 <= adapters <= 9:
            raise InvalidRequest(f"{adapters}; 9 at most", field="adapters")
        asked = serving.from_trace(trace, requests, tokens) if trace else serving.conversations(requests, tokens)
        source = "a trace" if trace else "conversations"
        serving.run(asked, source, family=model, adapters=adapters).show(json_file, plot)
        return
    if not 2 * BLOCK <= tokens <= 4000 or not 0 < hit < 1 or hidden % 256 or min(prompts, layers, hidden) < 1:
        raise InvalidRequest(f"{tokens}, {hit}, {prompts}, {layers}, {hidden}", field="tokens, hit, …, hidden")
    run(tokens, hit, prompts, layers, hidden, model).show(json_file, plot)
