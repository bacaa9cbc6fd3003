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
from quire_bench.engines.alternatives import Kept, Way, ways
from quire_tools.engines.models import make_adapter, make_model, settings_of
from quire_tools.engines.vllm import BLOCK
from quire_tools.report import Report, Row, percentile

_SIZES: Final = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 2}
_TOKEN_BYTES: Final = 8 * 2 * 2 * 64 * 4
_MEMORY_MIN: Final = 48 << 20
_NO_CACHE: Final = "vLLM alone"
_SETTLE_S: Final = 3.0
_KEPT_LOCALLY: Final = 3
_TALKS: Final = 4
_TRACE_BLOCK: Final = 512

Prompt = list[int]
Request = tuple[Prompt, Path | None]
"""Token ids, and the folder of the adapter."""


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
    turn = max(BLOCK, tokens * _TALKS // max(_TALKS, count))
    talks: list[Prompt] = [[] for _ in range(_TALKS)]
    prompts = []
    for number in range(count):
        talk = talks[number % _TALKS]
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


def run(prompts: Sequence[Prompt], source: str, *, family: str = "llama", adapters: int = 0) -> Report:
    """Measure all caches.

    Args:
        prompts: Token ids of each request.
        source: Their origin, for the report.
        family: Of the model, one of `FAMILIES`.
        adapters: Number of LoRA adapters that the conversations use in turn, after the model itself; 0 for none.

    Raises:
        InvalidRequest: Quire's answers differ from those of vLLM alone.
    """
    longest = max(map(len, prompts))
    room = 2 * sum(map(len, prompts)) * _TOKEN_BYTES + (64 << 20)
    settings: dict[str, Any] = {
        "max_model_len": longest + BLOCK,
        "kv_cache_memory_bytes": max(_MEMORY_MIN, _KEPT_LOCALLY * (longest + BLOCK) * _TOKEN_BYTES),
        **settings_of(family),
        **({"enable_lora": True, "max_lora_rank": 8, "max_loras": adapters} if adapters else {}),
    }
    days: dict[str, _Day] = {}
    notes = []
    with tempfile.TemporaryDirectory(prefix="quire-engines-") as name, Console().status("") as status:
        folder = Path(name)
        model = make_model(folder / "model", family=family, window=512, **_SIZES)
        sizes = {"layers": _SIZES["layers"], "hidden": _SIZES["hidden"], "kv_width": 64 * _SIZES["kv_heads"]}
        trained = [make_adapter(folder / f"adapter{number}", number, **sizes) for number in range(1, adapters + 1)]
        turns = [None, *trained] if trained else [None]
        requests = [(prompt, turns[number % _TALKS % len(turns)]) for number, prompt in enumerate(prompts)]
        for way, make in ways().items():
            status.update(way)
            own = folder / way.replace(" ", "-").replace(",", "")
            own.mkdir()
            try:
                days[way] = _day(make, model, own, settings, room, requests)
            except Exception as error:  # of another cache: the others are measured all the same
                if way in (_NO_CACHE, "Quire"):
                    raise
                notes.append(f"{way} does not serve this model: {repr(error)[:120]}")
                continue
            wrong = sum(ours != own for ours, own in zip(days[way].answers, days[_NO_CACHE].answers, strict=True))
            if wrong and way == "Quire":
                raise InvalidRequest(f"Quire: other tokens than vLLM computes alone, {wrong} times", field="engine")
            if wrong:
                del days[way]
                notes.append(f"{way} is left out: {wrong} of {len(prompts)} answers are not those of vLLM alone")
    report = _report(days, prompts)
    report.notes += [
        *notes,
        f"{len(prompts)} requests of {source}, one token each, one after the other; everything but what is kept "
        f"restarts after {len(prompts) // 2}; a model of the family {family}"
        + (f" with {adapters} adapters, which conversations use in turn" if adapters else ""),
        f"vLLM's own cache has {settings['kv_cache_memory_bytes'] >> 20} MiB; the longest request has {longest} tokens",
        "the tokens are the same in every row; one thread computes",
    ]
    return report


def _day(
    make: Way, model: Path, folder: Path, settings: dict[str, Any], room: int, requests: Sequence[Request]
) -> _Day:
    day, half = _Day(), len(requests) // 2
    with make(model, folder, settings, room) as kept:
        for part in (requests[:half], requests[half:]):
            _serve(kept, part, day)
        day.stored_bytes = kept.stored_bytes()
    return day


def _serve(kept: Kept, requests: Sequence[Request], day: _Day) -> None:
    from vllm.lora.request import LoRARequest

    with kept.start() as engine:
        engine.tokens(list(range(300, 300 + BLOCK)), 1)  # what an engine does once
        for prompt, adapter in requests:
            lora = LoRARequest(adapter.name, int(adapter.name[-1]), str(adapter)) if adapter else None
            started = time.perf_counter()
            answer, cached = engine.tokens(prompt, 1, lora=lora)
            day.seconds.append(time.perf_counter() - started)
            day.cached.append(cached)
            day.answers.append(answer)
        time.sleep(_SETTLE_S)  # what is stored behind the answers


def _report(days: dict[str, _Day], prompts: Sequence[Prompt]) -> Report:
    report = Report("engines", {"name": "the best of the others, same run", "unit": "mean ms"}, tall=True)
    means = {name: float(np.mean(day.seconds)) for name, day in days.items()}
    for name, day in days.items():
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
