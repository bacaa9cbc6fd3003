"""`quire bench never-slower`: a real vLLM over a link of one rate after another; loading must not cost what it saves.

In each cell, of rate, context and requests at once, the same kind of requests three times: vLLM computes all of it, it
loads whatever Quire has, and it does as the connector decides by itself. A cell is begun with some requests that are
not counted, some of them new: both costs are learned, nothing is configured. In the last cell one of two storage nodes
stands still.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.console import Console

from quire_bench.engines.engines import stored
from quire_tools.engines.models import make_model
from quire_tools.engines.vllm import BLOCK, Engine, require_vllm, vllm_engine
from quire_tools.local import LocalCluster
from quire_tools.report import Report, Row, percentile

_LAYERS, _HIDDEN, _HEADS, _KV_HEADS = 8, 512, 8, 2
_TOKEN_BYTES: Final = _LAYERS * 2 * _KV_HEADS * 64 * 4
_FREE: Final = 100_000_000_000
_LOAD_TIMEOUT_S: Final = 20.0
_KNOWN: Final = 4
_WAYS: Final = ("computing", "loading", "Quire decides")


@dataclass(frozen=True, slots=True)
class _Cell:
    """`mb_per_s` 0: as fast as it goes. `stalled`: one of two nodes stands still."""

    mb_per_s: int
    tokens: int
    at_once: int
    stalled: bool = False

    @property
    def name(self) -> str:
        rate = f"{self.mb_per_s} MB/s" if self.mb_per_s else "not limited"
        return f"{rate}{', a node stands still' if self.stalled else ''}"


class _Prompts:
    """Prefixes that were stored, with endings that were not; never the same twice."""

    def __init__(self, contexts: Sequence[int], count: int) -> None:
        self._draw = np.random.default_rng(11)
        self.firsts = {tokens: [self._tokens(tokens) for _ in range(count)] for tokens in contexts}

    def new(self, tokens: int, count: int) -> list[list[int]]:
        return [self._tokens(tokens) for _ in range(count)]

    def some(self, tokens: int, count: int) -> list[list[int]]:
        shared = tokens * 7 // 8 // BLOCK * BLOCK
        firsts = self.firsts[tokens]
        return [[*firsts[at % len(firsts)][:shared], *self._tokens(tokens - shared)] for at in range(count)]

    def _tokens(self, count: int) -> list[int]:
        drawn: list[int] = self._draw.integers(2, 258, count).tolist()
        return drawn


def _first_tokens(engine: Engine, prompts: Sequence[list[int]], begun: int) -> list[float]:
    """Of requests that come at the same time: seconds until the first token of each."""
    from vllm import SamplingParams

    core, seconds = engine.llm.llm_engine, list[float]()
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    for at, prompt in enumerate(prompts):
        core.add_request(f"{begun}-{at}", {"prompt_token_ids": prompt}, one)
    while core.has_unfinished_requests():
        seconds += [time.perf_counter() - started for each in core.step() if each.finished]
    return seconds


def _measure(engine: Engine, cell: _Cell, prompts: _Prompts, requests: int, uncounted: int) -> list[float]:
    seconds: list[float] = []
    for begun in range(-uncounted, requests):
        engine.forget()
        kind = prompts.new if begun < -_KNOWN else prompts.some
        told = _first_tokens(engine, kind(cell.tokens, cell.at_once), begun + uncounted)
        seconds += told if begun >= 0 else []
    return seconds


@contextmanager
def _shaped(cluster: LocalCluster, mb_per_s: int) -> Iterator[None]:
    """The scheduler has so much to give."""
    rate = mb_per_s * 10**6 if mb_per_s else _FREE
    cluster.kill("scheduler")
    cluster.restart("scheduler", environment={"QUIRE_SCHEDULER_LINKS": f"default={rate}"})
    yield


@contextmanager
def _standing_still(cluster: LocalCluster, name: str) -> Iterator[None]:
    os.kill(cluster.pid(name), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(cluster.pid(name), signal.SIGCONT)


def run(rates: list[int], contexts: list[int], at_once: list[int], requests: int, zero_copy: str) -> Report:
    """Raises `InvalidRequest` without vLLM."""
    version = require_vllm()
    report = Report(
        "never-slower",
        {"name": f"vLLM {version}: the better of computing and loading", "unit": "P99 ms"},
        tall=True,
    )
    grid = [_Cell(rate, tokens, several) for rate in rates for tokens in contexts for several in at_once]
    stalled = _Cell(0, max(contexts), 1, stalled=True)
    prompts = _Prompts(contexts, max(at_once))
    room = 4 * max(at_once) * sum(contexts) * _TOKEN_BYTES + (64 << 20)
    settings: dict[str, Any] = {"max_model_len": max(contexts) + BLOCK, "kv_cache_memory_bytes": room}
    seen: dict[tuple[_Cell, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="quire-never-slower-") as name, Console().status("") as status:
        folder = Path(name)
        model = make_model(folder / "model", layers=_LAYERS, hidden=_HIDDEN, heads=_HEADS, kv_heads=_KV_HEADS)
        with vllm_engine(model, **settings) as engine:
            for cell in [*grid, stalled]:
                status.update(f"computing: {cell.tokens} tokens, {cell.at_once} at once")
                same = next((each for each in seen if _shape(each[0]) == _shape(cell)), None)
                seen[cell, "computing"] = seen[same] if same else _measure(engine, cell, prompts, requests, 2)
        with LocalCluster(folder / "cluster", storage_nodes=2, arena_bytes=8 * room, drive_bytes=8 * room) as cluster:
            with vllm_engine(model, cluster.gateway_address, **settings) as engine:
                firsts = [each for several in prompts.firsts.values() for each in several]
                with stored(engine, sum(len(each) // BLOCK for each in firsts)):
                    for first in firsts:
                        engine.tokens(first, 1)
            for rate in [*rates, None]:
                cells = [each for each in grid if each.mb_per_s == rate] if rate is not None else [stalled]
                for way in _WAYS[1:]:
                    status.update(f"{way}: {cells[0].name}")
                    extra = {"cut_off": way != "loading", "zero_copy": zero_copy, "timeout_s": _LOAD_TIMEOUT_S}
                    with ExitStack() as stack:
                        stack.enter_context(_shaped(cluster, rate or 0))
                        made = stack.enter_context(vllm_engine(model, cluster.gateway_address, extra, **settings))
                        for cell in cells:
                            seen[cell, way] = _cell(made, cluster, cell, prompts, requests)
    _fill(report, seen, [*grid, stalled])
    report.notes += [
        f"{requests} rounds in each cell, and some before that are not counted; 7/8 of each prompt was stored before; "
        f"{_TOKEN_BYTES} bytes of KV a token; zero_copy: {zero_copy}",
        "P99 of the time to the first token; ratio: the better of the two, by what Quire decides; 0.91 is asked for",
    ]
    return report


def _shape(cell: _Cell) -> tuple[int, int]:
    return cell.tokens, cell.at_once


def _cell(engine: Engine, cluster: LocalCluster, cell: _Cell, prompts: _Prompts, requests: int) -> list[float]:
    uncounted = 2 * _KNOWN
    if not cell.stalled:
        return _measure(engine, cell, prompts, requests, uncounted)
    _measure(engine, cell, prompts, 0, uncounted)
    with _standing_still(cluster, "storage-1"):
        return _measure(engine, cell, prompts, requests, 0)


def _fill(report: Report, seen: dict[tuple[_Cell, str], list[float]], cells: Sequence[_Cell]) -> None:
    for cell in cells:
        tails = {way: percentile(seen[cell, way], 0.99) * 1e3 for way in _WAYS}
        better = min(tails["computing"], tails["loading"])
        params = {"link": cell.name, "tokens": cell.tokens, "at once": cell.at_once}
        report.rows.append(Row(params, tails, better, better / tails["Quire decides"]))


def command(
    rates: Annotated[str, typer.Option(help="of the link, MB/s, one or several; 0: not limited")] = "0,50,20,8",
    contexts: Annotated[str, typer.Option(help="tokens, one or several")] = "512,2048",
    at_once: Annotated[str, typer.Option(help="requests that come together, one or several")] = "1,4",
    requests: Annotated[int, typer.Option(help="rounds in each cell")] = 10,
    zero_copy: Annotated[str, typer.Option(help="the connector's setting")] = "never",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Time to first token of a real vLLM over a slow link: computed, loaded, and as Quire decides by itself."""
    numbers = [[int(text) for text in several.split(",")] for several in (rates, contexts, at_once)]
    run(numbers[0], numbers[1], numbers[2], requests, zero_copy).show(json_file, plot)
