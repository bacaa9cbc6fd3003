"""`quire bench engines --arrivals`: an engine whose requests arrive at random, with each cache that a user may choose.

An engine serves the beginnings of conversations, and ends; its cache stays, where there is one that can. A new engine
for each rate serves the next turn of each conversation. Turns arrive as a Poisson process (Tutti, Figure 8, in small);
every cache gets the same turns at the same times.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from quire.model.errors import InvalidRequest
from quire_bench.engines.alternatives import Way, ways
from quire_tools.engines.models import make_model, settings_of
from quire_tools.engines.vllm import BLOCK, Engine
from quire_tools.report import Report, Row, percentile

_SIZES: Final = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 2}
_TOKEN_BYTES: Final = 8 * 2 * 2 * 64 * 4
_ANSWER: Final = 8
_KEPT_LOCALLY: Final = 4
_SETTLE_S: Final = 3.0
_NO_CACHE: Final = "vLLM alone"

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Load:
    """Turns that arrive at `rate` per second: prompts, and seconds from the start at which each arrives."""

    rate: float
    prompts: tuple[Prompt, ...]
    arrivals_s: tuple[float, ...]


@dataclass(slots=True)
class Served:
    """Times of one cache under one load: of each request to the first token, and between tokens, seconds."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    cached: int = 0
    took_s: float = 0.0
    answers: dict[str, list[int]] = field(default_factory=dict)


def loads(rates: Sequence[float], count: int, tokens: int, turn: int) -> tuple[list[Prompt], list[Load]]:
    """Draw the beginnings of conversations, and for each rate their next turns.

    Args:
        rates: Turns per second.
        count: Number of conversations.
        tokens: Tokens of a prompt.
        turn: Those of them that are new in a turn.

    Raises:
        InvalidRequest: A rate is not positive, or a turn is not shorter than a prompt.
    """
    if not rates or min(rates) <= 0 or not 0 < turn < tokens:
        raise InvalidRequest(f"{rates}, {turn} of {tokens} tokens", field="arrivals, turn")
    draw = np.random.default_rng(11)
    beginnings: list[Prompt] = [draw.integers(2, 258, tokens - turn).tolist() for _ in range(count)]
    return beginnings, [
        Load(
            rate,
            tuple([*beginning, *draw.integers(2, 258, turn).tolist()] for beginning in beginnings),
            tuple(np.cumsum(draw.exponential(1 / rate, count)).tolist()),
        )
        for rate in rates
    ]


def serve(engine: Engine, load: Load) -> Served:
    """Add each request when it arrives, and step the engine until all are answered."""
    from vllm import SamplingParams

    core, served = engine.llm.llm_engine, Served()
    greedy = SamplingParams(temperature=0, max_tokens=_ANSWER, ignore_eos=True)
    requests = list(enumerate(zip(load.arrivals_s, load.prompts, strict=True)))
    last_s: dict[str, float] = {}
    started_s = time.perf_counter()
    while requests or core.has_unfinished_requests():
        now_s = time.perf_counter() - started_s
        while requests and requests[0][1][0] <= now_s:
            number, (arrival_s, prompt) = requests.pop(0)
            core.add_request(f"{load.rate}-{number}", {"prompt_token_ids": prompt}, greedy)
            last_s[f"{load.rate}-{number}"] = arrival_s
        if not core.has_unfinished_requests():
            time.sleep(max(0.0, requests[0][1][0] - now_s))
            continue
        outputs = core.step()
        now_s = time.perf_counter() - started_s
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            if not tokens:
                continue
            first = output.request_id not in served.answers
            (served.first_s if first else served.between_s).append(now_s - last_s[output.request_id])
            served.answers[output.request_id], last_s[output.request_id] = tokens, now_s
            served.cached += (output.num_cached_tokens or 0) if output.finished else 0
    served.took_s = time.perf_counter() - started_s
    return served


def run(rates: Sequence[float], count: int, tokens: int, turn: int, family: str) -> Report:
    """Measure all caches. Raises `InvalidRequest` where Quire's answers differ from those of vLLM alone."""
    beginnings, turns = loads(sorted(rates), count, tokens, turn)
    cache_bytes = max(48 << 20, _KEPT_LOCALLY * (tokens + BLOCK) * _TOKEN_BYTES)
    settings: dict[str, Any] = {
        "max_model_len": tokens + BLOCK,
        "kv_cache_memory_bytes": cache_bytes,
        **settings_of(family),
    }
    room = 2 * (len(rates) + 1) * count * tokens * _TOKEN_BYTES + (64 << 20)
    results: dict[str, list[Served]] = {}
    notes = []
    with tempfile.TemporaryDirectory(prefix="quire-arrivals-") as name, Console().status("") as status:
        model = make_model(Path(name) / "model", family=family, window=512, **_SIZES)
        for number, (way, make) in enumerate(ways().items()):
            status.update(way)
            folder = Path(name) / str(number)
            folder.mkdir()
            try:
                results[way] = _measure(make, model, folder, settings, room, beginnings, turns)
            except Exception as error:  # of another cache: the others are measured all the same
                if way in (_NO_CACHE, "Quire"):
                    raise
                notes.append(f"{way} does not serve this model: {repr(error)[:120]}")
    report = _report(results, turns)
    report.notes += [
        *notes,
        f"{count} conversations of {tokens} tokens, {turn} of them new, {_ANSWER} tokens an answer; family {family}",
        f"vLLM's own cache has {cache_bytes >> 20} MiB; each rate has a new engine",
    ]
    return report


def _measure(
    make: Way,
    model: Path,
    folder: Path,
    settings: dict[str, Any],
    room: int,
    beginnings: Sequence[Prompt],
    turns: Sequence[Load],
) -> list[Served]:
    with make(model, folder, settings, room) as cache:
        with cache.start() as engine:
            for beginning in beginnings:
                engine.tokens(beginning, 1)
            time.sleep(_SETTLE_S)  # for what is stored after the answers
        served = []
        for load in turns:
            with cache.start() as engine:
                engine.tokens(list(range(300, 300 + BLOCK)), 1)  # what an engine does once
                served.append(serve(engine, load))
        return served


def _report(results: dict[str, list[Served]], turns: Sequence[Load]) -> Report:
    baseline = {"name": "mean time to first token with the best of the others, same rate and run", "unit": "ms"}
    report = Report("engines", baseline, tall=True)
    for at, load in enumerate(turns):
        for way, served in results.items():
            result, alone = served[at], results[_NO_CACHE][at]
            if way == "Quire" and result.answers != alone.answers:
                raise InvalidRequest(f"{way}: other tokens than vLLM computes alone", field="engine")
            best = min(float(np.mean(runs[at].first_s)) for name, runs in results.items() if name != way)
            mean = float(np.mean(result.first_s))
            measured = {
                "hit tokens, %": 100 * result.cached / sum(map(len, load.prompts)),
                "first token, mean ms": mean * 1e3,
                "p90 ms": percentile(result.first_s, 0.9) * 1e3,
                "between tokens, mean ms": float(np.mean(result.between_s)) * 1e3,
                "answered per s": len(load.prompts) / result.took_s,
            }
            params = {"requests per s": load.rate, "cache": way}
            report.rows.append(Row(params, measured, best * 1e3, best / mean))
    report.notes += _bounds(results, turns)
    return report


def _bounds(results: dict[str, list[Served]], turns: Sequence[Load]) -> list[str]:
    """Describe up to which rate caches serve within twice the time to first token of vLLM alone at the lowest one."""
    bound_s = 2 * float(np.median(results[_NO_CACHE][0].first_s))
    notes = []
    for way, served in results.items():
        tails_s = [percentile(result.first_s, 0.9) for result in served]
        within = list(takewhile(lambda tail_s: tail_s <= bound_s, tails_s))
        text = f"{turns[len(within) - 1].rate:g} requests per s" if within else "no rate that was tried"
        notes.append(f"{way}: {text} with nine of ten first tokens within {bound_s * 1e3:.0f} ms")
    return notes
