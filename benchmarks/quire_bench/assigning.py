"""Assignment of prompts to engines: a trace on simulated engines, and the latency of the answer.

The trace runs on virtual time. Decisions are those of the orchestrator's own code; engines are modelled: each prefills
one prompt at a time, and keeps the least recently used blocks that fit its memory. Every computed block is
in Quire, on nodes of other hosts, whichever way engines are chosen.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
import uvloop
from rich.progress import track

from quire.client import AsyncClient
from quire.model.assignment import Engine, EngineTable
from quire.model.errors import InvalidRequest
from quire.model.hashing import HashAlgorithm, Namespace, block_keys
from quire.model.layout import KvLayout
from quire.model.ranges import ChunkRange
from quire.transport import OFF, data_plane
from quire_bench.filling import fill, llama_layout
from quire_orchestrator.core.assignment import CachedPrompt, Source, assign
from quire_tools.cli.options import Json, Plot, numbers
from quire_tools.local import LocalCluster
from quire_tools.plan.requests import read_requests
from quire_tools.report import Report, Row, percentile

_BLOCK_TOKENS: Final = 512  # of Mooncake's traces
_LAYERS: Final = 32
_FIXED_S: Final = 0.010
_HOST_BYTES_PER_S: Final = 4e9
_GBIT: Final = 1e9 / 8
_WARM: Final = 50
Request = tuple[list[bytes], int, float]
Choice = Callable[[int, CachedPrompt, EngineTable, Sequence[int]], int]
"""Of the engine: by the number of the request, what Quire has of it, the engines, and their unanswered requests."""


@dataclass(slots=True)
class _Engine:
    """An engine. `free_s`: end of its last prompt; `blocks`: in its own memory, least recently used first."""

    capacity: int
    free_s: float = 0.0
    queue: list[tuple[float, int]] = field(default_factory=list)
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def cached(self, blocks: Sequence[bytes]) -> int:
        """How many of the prompt's first blocks it has."""
        return next((at for at, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def queued_tokens(self, now_s: float) -> int:
        """Tokens of prompts that it has not answered yet."""
        self.queue = [(end_s, tokens) for end_s, tokens in self.queue if end_s > now_s]
        return sum(tokens for _, tokens in self.queue)

    def use(self, blocks: Sequence[bytes]) -> None:
        """Keep blocks, and forget what does not fit."""
        for block in blocks:
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The simulated engines: how many, tokens per second, tokens of memory, and bytes per second of each one's link."""

    count: int
    tokens_per_s: float
    memory_tokens: int
    link_bytes_per_s: float


def simulate(requests: Sequence[Request], engines: Engines, choose: Choice, speed: float) -> list[float]:
    """Play a trace.

    Args:
        requests: Blocks, tokens and arrival of each.
        engines: That there are.
        choose: Returns the number of the engine for a request.
        speed: Arrivals come this many times faster.

    Returns:
        Seconds to the first token of each request.
    """
    pool = [_Engine(engines.memory_tokens // _BLOCK_TOKENS) for _ in range(engines.count)]
    layout, stored, times = llama_layout(_LAYERS, _BLOCK_TOKENS), dict[bytes, float](), list[float]()
    source = {"node": Source(host="", bytes_per_s=round(engines.link_bytes_per_s))}
    names = [f"engine-{number}" for number in range(engines.count)]
    for number, (blocks, tokens, arrival_s) in enumerate(requests):
        now_s = arrival_s / speed
        readable = next((at for at, block in enumerate(blocks) if stored.get(block, now_s + 1) > now_s), len(blocks))
        prompt = CachedPrompt(
            tokens=max(tokens, len(blocks) * _BLOCK_TOKENS),
            tip=blocks[-1].rjust(32, b"\0"),
            layout=layout,
            ranges=(ChunkRange("node", 0, readable),) if readable else (),
            sources=source,
            fixed_s=_FIXED_S,
            host_bytes_per_s=_HOST_BYTES_PER_S,
        )
        table = _table(names, pool, blocks, now_s, engines)
        chosen = choose(number, prompt, table, [len(engine.queue) for engine in pool])
        engine = pool[chosen]
        alone = EngineTable(
            names=["alone"],
            hosts=[""],
            cached_tokens=table.cached_tokens[chosen : chosen + 1],
            queued_tokens=np.zeros(1, dtype=np.int64),
            tokens_per_s=table.tokens_per_s[:1],
        )
        took_s = assign(prompt, alone).ttft_s[0]
        end_s = max(now_s, engine.free_s) + took_s
        engine.free_s = end_s
        engine.queue.append((end_s, round(took_s * engines.tokens_per_s)))
        engine.use(blocks)
        for block in blocks:
            stored[block] = min(stored.get(block, end_s), end_s)
        times.append(end_s - now_s)
    return times


def _table(
    names: Sequence[str], pool: Sequence[_Engine], blocks: Sequence[bytes], now_s: float, engines: Engines
) -> EngineTable:
    return EngineTable(
        names=names,
        hosts=[""] * len(pool),
        cached_tokens=np.array([engine.cached(blocks) * _BLOCK_TOKENS for engine in pool], dtype=np.int64),
        queued_tokens=np.array([engine.queued_tokens(now_s) for engine in pool], dtype=np.int64),
        tokens_per_s=np.full(len(pool), engines.tokens_per_s),
    )


def by_assignment(number: int, prompt: CachedPrompt, engines: EngineTable, unanswered: Sequence[int]) -> int:
    """Choose as the orchestrator does."""
    return list(engines.names).index(assign(prompt, engines).engine)


def in_turns(number: int, prompt: CachedPrompt, engines: EngineTable, unanswered: Sequence[int]) -> int:
    """Choose round robin."""
    return number % len(engines.names)


def least_loaded(number: int, prompt: CachedPrompt, engines: EngineTable, unanswered: Sequence[int]) -> int:
    """The engine with the fewest unanswered requests; of several the first in turn."""
    return min(range(len(unanswered)), key=lambda at: (unanswered[at], (at - number) % len(unanswered)))


def shortest_queue(number: int, prompt: CachedPrompt, engines: EngineTable, unanswered: Sequence[int]) -> int:
    """The engine that is ready first, as if all that Quire saves were known."""
    return int(np.argmin(engines.queued_tokens))


def run_trace(trace: Path, played: int, count: int, engines: Engines, speeds: Sequence[float]) -> Report:
    """Play a trace at several speeds; the `count` requests behind the first `played` ones count."""
    requests = read_requests(trace)[: played + count]
    if len(requests) <= played:
        raise InvalidRequest(f"{len(requests)} requests, none behind the first {played}", field="played")
    name = "the same engines with Quire, chosen in another way, same trace"
    report = Report("assign", {"name": name, "unit": "s"}, tall=True)
    ways = {
        "round robin": in_turns,
        "fewest unanswered requests": least_loaded,
        "shortest queue, if its time were known": shortest_queue,
    }
    for speed in track(speeds, "speeds", transient=True):
        ours = simulate(requests, engines, by_assignment, speed)[played:]
        for way, choice in ways.items():
            base = simulate(requests, engines, choice, speed)[played:]
            measured = {
                "mean TTFT s": float(np.mean(ours)),
                "p99 s": percentile(ours, 0.99),
                "baseline p99 s": percentile(base, 0.99),
            }
            ratio = float(np.mean(ours) / np.mean(base))
            report.rows.append(Row({"speed": speed, "against": way}, measured, float(np.mean(base)), ratio))
    report.notes.append(
        f"{len(requests) - played} requests behind {played}; Llama 3.1 8B, {engines.count} engines of "
        f"{engines.tokens_per_s:g} tokens/s with {engines.memory_tokens} tokens of memory, links of "
        f"{engines.link_bytes_per_s / _GBIT:g} Gbit/s; virtual time"
    )
    return report


def run_latency(engines: int, chunks: int, rounds: int) -> Report:
    """Measure the answer at a client of the gateway, against that to the smallest question."""
    settings = {"QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": "", "QUIRE_SHARED_MEMORY": OFF}
    layout = KvLayout(1, 16, 1, 16, llama_layout(1, 16).dtype)
    with (
        tempfile.TemporaryDirectory(prefix="quire-assign-") as folder,
        LocalCluster(Path(folder), arena_bytes=1 << 28, settings=settings) as cluster,
    ):
        times, empty = uvloop.run(_latencies(cluster, layout, engines, chunks, rounds))
    report = Report("assign", {"name": "a question about one engine and one chunk, same run", "unit": "ms"}, tall=True)
    measured = {"p50 ms": percentile(times, 0.5) * 1e3, "p99 ms": percentile(times, 0.99) * 1e3}
    base = percentile(empty, 0.99) * 1e3
    report.rows.append(Row({"engines": engines, "chunks": chunks}, measured, base, measured["p99 ms"] / base))
    report.notes.append(f"{rounds} rounds, one caller; the baseline's p99")
    return report


async def _latencies(
    cluster: LocalCluster, layout: KvLayout, engines: int, chunks: int, rounds: int
) -> tuple[list[float], list[float]]:
    namespace, draw = Namespace("bench", os.urandom(4).hex(), layout), np.random.default_rng(3)
    keys = block_keys(namespace, list(range(chunks * layout.chunk_tokens)), HashAlgorithm.BLAKE3)
    prompt_tokens = (chunks + 1) * layout.chunk_tokens
    many = [
        Engine(
            name=f"engine-{number}",
            host=f"host-{number // 8}",
            cached_tokens=int(draw.integers(0, prompt_tokens)),
            queued_tokens=int(draw.integers(0, 100_000)),
            tokens_per_s=float(draw.uniform(2_000, 20_000)),
        )
        for number in range(engines)
    ]
    questions = (keys, prompt_tokens, many), (keys.run(0, 1), 2 * layout.chunk_tokens, many[:1])
    times: tuple[list[float], list[float]] = ([], [])
    async with AsyncClient(cluster.gateway_address, transport=data_plane(OFF)) as client:
        await fill(client, namespace, keys)
        for number in range(rounds + _WARM):
            for question, into in zip(questions, times, strict=True):
                started = time.perf_counter()
                await client.assign(namespace, *question)
                if number >= _WARM:
                    into.append(time.perf_counter() - started)
    return times


def command(
    trace: Annotated[
        Path | None, typer.Option(help="in Mooncake's format; else the time of an answer is measured")
    ] = None,
    played: Annotated[int, typer.Option(help="requests of the trace before those that count")] = 3_000,
    requests: Annotated[int, typer.Option(help="of the trace that count")] = 200,
    engines: Annotated[int, typer.Option(help="how many; 0: 4 for a trace, 1,000 for the time of an answer")] = 0,
    speeds: Annotated[str, typer.Option(help="of arrivals, one or several")] = "0.4,0.6,0.8",
    tokens_per_s: Annotated[float, typer.Option(help="that an engine prefills")] = 8_000.0,
    memory_tokens: Annotated[int, typer.Option(help="of an engine")] = 200_000,
    link_gbps: Annotated[float, typer.Option(help="of an engine, Gbit/s")] = 25.0,
    chunks: Annotated[int, typer.Option(help="of the prompt whose answer is measured")] = 4_096,
    rounds: Annotated[int, typer.Option(help="of that measurement")] = 500,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Time to first token of a trace by assignment; or the time of an assignment, at the client."""
    if (
        min(requests, memory_tokens, chunks, rounds) < 1
        or min(engines, played) < 0
        or min(tokens_per_s, link_gbps) <= 0
    ):
        raise InvalidRequest("a number is not positive", field="requests, …, rounds")
    if trace is None:
        run_latency(engines or 1_000, chunks, rounds).show(json_file, plot)
        return
    simulated = Engines(
        count=engines or 4,
        tokens_per_s=tokens_per_s,
        memory_tokens=memory_tokens,
        link_bytes_per_s=link_gbps * _GBIT,
    )
    run_trace(trace, played, requests, simulated, numbers(speeds, float)).show(json_file, plot)
