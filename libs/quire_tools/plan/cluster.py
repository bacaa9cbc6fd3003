"""`quire plan cluster`: a trace on many nodes, with the placement that decides in production.

The trace is played several times at once, each time as other conversations. Storage nodes are modelled: each keeps its
blocks until it is full, and then evicts the least recently used ones. Where chunks go is decided by the orchestrator's
own code, from the nodes' last heartbeats. The processor time of the work is taken from the benchmarks that `_PRICES`
names; messages are counted.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.progress import Progress

from quire.model.errors import InvalidRequest
from quire.model.keys import ChunkKeys
from quire.model.nodes import Node, StorageInfo
from quire_orchestrator.core.placement import Placement
from quire_tools.plan.requests import read_requests
from quire_tools.report import Report, Row

_PRICES: Final = {
    "Redis, a look-up": 36e-6,  # `quire bench index`, match of its own chain, the longest
    "Redis, a chunk registered": 13e-6,  # the same, turns of 16 chunks
    "Redis, a report": 52e-6,  # `quire bench membership`, 1,000 members
    "orchestrators, a report": 526e-6,  # the same
}
"""Seconds of a core, as these benchmarks measured on the two virtual cores of the README's figures."""
_REDIS_BYTES: Final = 21.4
"""A chunk of conversations behind a common prompt (`quire bench index`)."""
_CHUNK_TOKENS: Final = 16
_REPORT_S: Final = 0.0025
_WINDOW_S: Final = 10.0
_RACK_NODES: Final = 20
_TIMES: Final = 50


@dataclass(slots=True)
class _Played:
    """Counts of a replay. `windows`: bytes that each node sent by window of ten seconds."""

    hours: float = 0.0
    requests: int = 0
    blocks: int = 0
    hits: int = 0
    stored: int = 0
    allocations: int = 0
    nodes_a_request: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    sent: Counter[int] = field(default_factory=Counter)
    windows: Counter[tuple[int, int]] = field(default_factory=Counter)
    after: list[int] = field(default_factory=lambda: [0, 0])


class _Nodes:
    """Storage nodes as a model, and what their orchestrator knows of them."""

    def __init__(self, count: int, capacity_bytes: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._most = capacity_bytes // block_bytes
        self.held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        self.where: dict[bytes, int] = {}
        self.reported = [
            Node(node_id=f"storage-{number}", about=StorageInfo(capacity_bytes=capacity_bytes))
            for number in range(count)
        ]
        self._placement = Placement(2.0)
        self._number = {node.node_id: number for number, node in enumerate(self.reported)}

    def report(self) -> None:
        """Heartbeats."""
        self.reported = [self._now(number, node) for number, node in enumerate(self.reported)]

    def _now(self, number: int, node: Node) -> Node:
        used = len(self.held[number]) * self._block_bytes
        if used == node.used_bytes or not isinstance(node.about, StorageInfo):
            return node
        return replace(node, about=replace(node.about, used_bytes=used))

    def use(self, block: bytes) -> int:
        """The node that has it."""
        number = self.where[block]
        self.held[number].move_to_end(block)
        return number

    def store(self, keys: ChunkKeys, first: int, now_s: float) -> None:
        """Store the new blocks, placed by the orchestrator."""
        for target in self._placement.place(keys, first, self.reported, self._block_bytes, now_s):
            number = self._number[target.node_id]
            blocks = self.held[number]
            for at in reversed(range(target.first, target.stop)):  # what others extend goes last
                blocks[keys.at(at)] = None
                self.where[keys.at(at)] = number
            while len(blocks) > self._most:
                del self.where[blocks.popitem(last=False)[0]]

    def lose(self, numbers: range) -> None:
        """Remove all blocks of these nodes."""
        for number in numbers:
            for block in self.held[number]:
                del self.where[block]
            self.held[number].clear()


def _play(
    requests: Sequence[tuple[list[bytes], int, float]],
    times: int,
    nodes: _Nodes,
    block_bytes: int,
    *,
    lost_nodes: range | None,
    step: Callable[[], None],
) -> _Played:
    """`lost_nodes`: nodes that lose all at half of the trace; hits after that are counted separately."""
    played, began_s = _Played(), requests[0][2]
    half_s, reported_s, is_lost = (requests[-1][2] - began_s) / 2, -1.0, False
    played.hours = (requests[-1][2] - began_s) / 3600
    for blocks, _, at_s in requests:
        now_s = at_s - began_s
        if now_s - reported_s >= max(1.0, _REPORT_S * len(nodes.held)):
            nodes.report()
            reported_s = now_s
        if lost_nodes is not None and not is_lost and now_s >= half_s:
            nodes.lose(lost_nodes)
            is_lost = True
        for turn in range(times):
            keys = ChunkKeys(b"".join(_named(turn, block) for block in blocks))
            matched = next((at for at in range(len(keys)) if keys.at(at) not in nodes.where), len(keys))
            senders = Counter(nodes.use(keys.at(at)) for at in reversed(range(matched)))
            for number, count in senders.items():
                played.sent[number] += count * block_bytes
                played.windows[number, int(now_s / _WINDOW_S)] += count * block_bytes
            if matched:
                played.nodes_a_request.append(len(senders))
            if now_s >= half_s:
                played.after[0] += matched
                played.after[1] += len(keys)
            if matched < len(keys):
                nodes.store(keys, matched, now_s)
                played.allocations += 1
                played.stored += len(keys) - matched
            played.requests += 1
            played.blocks += len(keys)
            played.hits += matched
        step()
    played.used = [len(node_blocks) * block_bytes for node_blocks in nodes.held]
    return played


def _named(turn: int, block: bytes) -> bytes:
    return hashlib.blake2b(turn.to_bytes(4, "big") + block, digest_size=32).digest()


def run(
    trace: Path, sizes: Sequence[int], times: int, node_gb: float, bytes_per_token: int, block_tokens: int, hour: float
) -> tuple[Report, dict[int, _Played]]:
    """Replay the trace. Raises `InvalidRequest` for a trace without times, or a number that is not positive."""
    if min(*sizes, node_gb, bytes_per_token, block_tokens) <= 0 or times < 0:
        raise InvalidRequest(f"nodes {list(sizes)}, {node_gb:g} GB, {bytes_per_token} bytes a token", field="nodes")
    requests = read_requests(trace)
    if requests[-1][2] <= requests[0][2]:
        raise InvalidRequest("its requests have no times", field="trace")
    report = Report("plan cluster", {"name": "the mean of the nodes", "unit": "of the mean"}, tall=True)
    block_bytes, results = block_tokens * bytes_per_token, dict[int, _Played]()
    with Progress(transient=True) as progress:
        task = progress.add_task("replay", total=2 * len(sizes) * len(requests))
        for size in sizes:
            played_times = times or max(1, size // _TIMES)

            def play(lost_nodes: range | None, size: int = size, played_times: int = played_times) -> _Played:
                nodes = _Nodes(size, int(node_gb * 1e9), block_bytes)
                step = lambda: progress.advance(task)  # noqa: E731
                return _play(requests, played_times, nodes, block_bytes, lost_nodes=lost_nodes, step=step)

            played, degraded = play(None), play(range(min(_RACK_NODES, max(1, size // 5))))
            results[size] = played
            measured = _measured(played, degraded, size, block_tokens, block_bytes, hour)
            fullest = max(played.used) / np.mean(played.used)
            report.rows.append(Row({"nodes": size, "times the trace": played_times}, measured, 1.0, float(fullest)))
    report.notes += [
        f"{len(requests)} requests in {results[sizes[0]].hours:.2f} h, played so many times at once; a node has "
        f"{node_gb:g} GB; blocks of {block_tokens} tokens, {block_bytes >> 20} MiB, each with one copy",
        "ratio: the fullest node; a rack is a fifth of the nodes, 20 at most: hits of the trace's second half, of all "
        "blocks, when it loses everything at half, and when it does not",
        "cores are counted work times what the benchmarks measured for it: " + ", ".join(_PRICES),
    ]
    return report, results


def _measured(
    played: _Played, degraded: _Played, size: int, block_tokens: int, block_bytes: int, hour: float
) -> dict[str, float]:
    seconds = played.hours * 3600
    chunks = block_tokens / _CHUNK_TOKENS
    reports = size / max(1.0, _REPORT_S * size)
    redis = (
        played.requests / seconds * _PRICES["Redis, a look-up"]
        + played.stored * chunks / seconds * _PRICES["Redis, a chunk registered"]
        + reports * _PRICES["Redis, a report"]
    )
    sent = [played.sent[number] for number in range(size)]
    tokens = played.blocks * block_tokens
    return {
        "hits, %": 100 * played.hits / played.blocks,
        "look-ups/s": played.requests / seconds,
        "Redis, cores": redis,
        "Redis, GB": sum(played.used) / block_bytes * chunks * _REDIS_BYTES / 1e9,
        "allocations/s": played.allocations / seconds,
        "orchestrators for reports, cores": reports * _PRICES["orchestrators, a report"],
        "nodes a request": float(np.mean(played.nodes_a_request)),
        "busiest link, of the mean": max(sent) / float(np.mean(sent)),
        "busiest 10 s of a link, GB/s": max(played.windows.values()) / _WINDOW_S / 1e9,
        "hits after half, %": 100 * played.after[0] / played.after[1],
        "a rack lost, %": 100 * degraded.after[0] / degraded.after[1],
        "$ per 1M tokens": size * hour * played.hours / tokens * 1e6,
    }


def draw(results: dict[int, _Played], path: Path) -> None:
    """How full nodes are, and what their links carried, from the least to the most, over the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for size, played in results.items():
        sent = [played.sent[number] for number in range(size)]
        for axis, values in zip(axes, (played.used, sent), strict=True):
            axis.plot(np.linspace(0, 1, size), np.sort(values) / np.mean(values), label=f"{size} nodes")
    for axis, title in zip(axes, ("what nodes hold", "what their links carried"), strict=True):
        axis.axhline(1.0, color="grey", linewidth=0.5)
        axis.set(title=title, xlabel="nodes, in order", ylabel="over the mean")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def command(
    trace: Annotated[Path, typer.Option(help="JSON lines with timestamp, input_length, hash_ids (Mooncake's format)")],
    nodes: Annotated[str, typer.Option(help="storage nodes, one number or several")] = "10,100",
    times: Annotated[int, typer.Option(help="how often the trace is played at once; 0: one for each 50 nodes")] = 0,
    node_gb: Annotated[float, typer.Option(help="what a node has space for")] = 1000,
    bytes_per_token: Annotated[int, typer.Option(help="KV of a token, all layers")] = 131_072,
    block_tokens: Annotated[int, typer.Option(help="tokens per block of the trace")] = 512,
    node_hour: Annotated[float, typer.Option(help="$ of a storage node's hour")] = 2.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw the result there (PNG)")] = None,
) -> None:
    """Replay a trace on a cluster of a number of nodes: hits, the spread of load, metadata, the loss of a rack."""
    sizes = [int(size) for size in nodes.split(",")]
    report, results = run(
        trace, sizes, times, node_gb, bytes_per_token=bytes_per_token, block_tokens=block_tokens, hour=node_hour
    )
    report.show(json_file, plot, draw=lambda path: draw(results, path))
