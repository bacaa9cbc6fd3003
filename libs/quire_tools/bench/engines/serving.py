"""`quire bench engines --against`: one engine's day, with each cache that a vLLM user may choose, in one run.

Requests come one after the other; in the middle everything restarts but what is meant to stay. The prompts are those of
a trace in Mooncake's format, scaled, or conversations that grow by turns. vLLM's own cache has room for a few of them.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from quire.model.errors import InvalidRequest
from quire_tools.bench.engines.alternatives import Kept, Way, ways
from quire_tools.bench.engines.models import make_model
from quire_tools.bench.engines.vllm import BLOCK
from quire_tools.bench.report import Report, Row, percentile

_LAYERS, _HIDDEN, _HEADS, _KV_HEADS = 8, 512, 8, 2
_TOKEN_BYTES: Final = _LAYERS * 2 * _KV_HEADS * 64 * 4
_SETTLE_S: Final = 3.0
_KEPT_LOCALLY: Final = 3
_TRACE_BLOCK: Final = 512

Prompt = list[int]


@dataclass(slots=True)
class _Day:
    """Of one way: seconds to the first token, cached tokens and answers, request by request."""

    seconds: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    stored_bytes: float = 0.0


def conversations(count: int, tokens: int) -> list[Prompt]:
    """So many requests of at most `tokens`: four conversations take turns, each request repeats all before it."""
    draw = np.random.default_rng(7)
    turn = max(BLOCK, tokens * 4 // max(4, count))
    talks: list[Prompt] = [[] for _ in range(4)]
    prompts = []
    for number in range(count):
        talk = talks[number % 4]
        talk += draw.integers(2, 258, min(turn, tokens - len(talk)) or 1).tolist()
        prompts.append(talk[:tokens])
    return prompts


def from_trace(file: Path, count: int, tokens: int) -> list[Prompt]:
    """The first requests of a trace, with a block of this engine's in place of each of 512 tokens.

    Raises `InvalidRequest` for what is no trace.
    """
    prompts: list[Prompt] = []
    try:
        with file.open() as lines:
            for line in lines:
                blocks = json.loads(line)["hash_ids"]
                prompt = [token for block in blocks for token in _block(int(block))]
                prompts.append([*prompt[: tokens - 1], 2 + len(prompts) % 250])
                if len(prompts) == count:
                    break
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{file}: {error}", field="trace") from None
    return prompts


def _block(number: int) -> Prompt:
    tokens: Prompt = np.random.default_rng(number).integers(2, 258, BLOCK).tolist()
    return tokens


def run(prompts: Sequence[Prompt], source: str) -> Report:
    """Raises `InvalidRequest` where an answer differs from vLLM's alone."""
    longest = max(map(len, prompts))
    room = 2 * sum(map(len, prompts)) * _TOKEN_BYTES + (64 << 20)
    settings: dict[str, Any] = {
        "max_model_len": longest + BLOCK,
        "kv_cache_memory_bytes": _KEPT_LOCALLY * (longest + BLOCK) * _TOKEN_BYTES,
    }
    days: dict[str, _Day] = {}
    with tempfile.TemporaryDirectory(prefix="quire-engines-") as name, Console().status("") as status:
        folder = Path(name)
        model = make_model(folder / "model", layers=_LAYERS, hidden=_HIDDEN, heads=_HEADS, kv_heads=_KV_HEADS)
        for way, make in ways().items():
            status.update(way)
            own = folder / way.replace(" ", "-").replace(",", "")
            own.mkdir()
            days[way] = _day(make, model, own, settings, room, prompts)
    report = _report(days, prompts)
    report.notes += [
        f"{len(prompts)} requests of {source}, one token each, one after the other; everything but what is kept "
        f"restarts after {len(prompts) // 2}",
        f"vLLM's own cache has room for {_KEPT_LOCALLY} of the longest requests ({longest} tokens)",
        "the tokens are the same in every row, or this fails; one thread computes",
    ]
    return report


def _day(make: Way, model: Path, folder: Path, settings: dict[str, Any], room: int, prompts: Sequence[Prompt]) -> _Day:
    day, half = _Day(), len(prompts) // 2
    with make(model, folder, settings, room) as kept:
        for part in (prompts[:half], prompts[half:]):
            _serve(kept, part, day)
        day.stored_bytes = kept.stored_bytes()
    return day


def _serve(kept: Kept, prompts: Sequence[Prompt], day: _Day) -> None:
    with kept.start() as engine:
        engine.tokens(list(range(300, 300 + BLOCK)), 1)  # what an engine does once
        for prompt in prompts:
            started = time.perf_counter()
            answer, cached = engine.tokens(prompt, 1)
            day.seconds.append(time.perf_counter() - started)
            day.cached.append(cached)
            day.answers.append(answer)
        time.sleep(_SETTLE_S)  # what is stored behind the answers


def _report(days: dict[str, _Day], prompts: Sequence[Prompt]) -> Report:
    report = Report("engines", {"name": "the best of the others, same run", "unit": "mean ms"}, tall=True)
    means = {name: float(np.mean(day.seconds)) for name, day in days.items()}
    expected = days["vLLM alone"].answers
    for name, day in days.items():
        if day.answers != expected:
            raise InvalidRequest(f"{name}: other tokens than vLLM computes alone", field="engine")
        half = len(prompts) // 2
        best = min(mean for each, mean in means.items() if each != name)
        measured = {
            "hit tokens, %": 100 * sum(day.cached) / sum(map(len, prompts)),
            "after the restart": 100 * sum(day.cached[half:]) / sum(map(len, prompts[half:])),
            "p50 ms": percentile(day.seconds, 0.5) * 1e3,
            "p99 ms": percentile(day.seconds, 0.99) * 1e3,
            "mean ms": means[name] * 1e3,
            "stored MiB": day.stored_bytes / (1 << 20),
        }
        report.rows.append(Row({"what": name}, measured, best * 1e3, best / means[name]))
    return report
