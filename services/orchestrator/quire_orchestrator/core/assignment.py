"""Choice of the engine that prefills a prompt (ObjectCache, §3), by the time to first token of each engine.

The time is that of its queue, and of Eq. 3: a layer is computed while the next one is loaded. An engine has some of the
prompt itself; the rest of the stored chunks comes from storage nodes on its host, from others over their links, or from
the object tier; chunks that are not loaded are computed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.model.assignment import Assignment, EngineTable
from quire.model.layout import KvLayout
from quire.model.object_part import ObjectPart
from quire.model.profile import ttft_s
from quire.model.ranges import ChunkRange

_SHARES: Final = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
"""Of the chunks that an engine could load, those that are considered."""
_EQUAL: Final = 1.001
"""Times that differ by less are equal: estimates are no better."""
_LOAD_MAX: Final = 2.0
"""An engine with more queued tokens than this many times the mean, and the prompt, gets no more."""
Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A storage node that delivers a part of a prompt. `bytes_per_s`: of one more delivery on its link."""

    host: str
    bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrompt:
    """The part of a prompt that Quire has.

    Attributes:
        tokens: Length of the prompt.
        tip: Key of its last chunk; engines with equal times take turns by it.
        layout: Of the chunks.
        ranges: Chunks that can be read, and their nodes.
        sources: These nodes.
        objects: Part that the object tier alone has.
        fixed_s: Cost of a load besides its bytes.
        host_bytes_per_s: Rate of copies on one host.
    """

    tokens: int
    tip: bytes
    layout: KvLayout
    ranges: Sequence[ChunkRange] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)
    objects: ObjectPart = field(default_factory=ObjectPart)
    fixed_s: float
    host_bytes_per_s: float

    @property
    def chunks(self) -> int:
        """Chunks that can be read, from the start."""
        return self.ranges[-1].stop if self.ranges else 0


def assign(prompt: CachedPrompt, engines: EngineTable) -> Assignment:
    """Choose an engine.

    Its expected time is never above the mean of all, so that the choice is no worse than a random one. Equal questions
    have equal answers. An engine that is far busier than the others gets nothing where that allows it.
    """
    expected, takes = _estimates(prompt, engines)
    options = np.argmin(expected, axis=1)
    times = expected[np.arange(len(options)), options]
    may_take = engines.queued_tokens <= _LOAD_MAX * engines.queued_tokens.mean() + prompt.tokens
    chosen = _choose(times, may_take, engines.names, prompt)
    return Assignment(engines.names[chosen], int(takes[chosen, int(options[chosen])]), times.tolist())


def _choose(times: Array, may_take: npt.NDArray[np.bool_], names: Sequence[str], prompt: CachedPrompt) -> int:
    """Return the engine with the shortest time; of equal ones that with the strongest claim on the prompt."""
    mean, allowed = float(times.mean()), np.where(may_take, times, np.inf)
    if allowed.min() > mean:
        allowed = times
    equal = np.flatnonzero(allowed <= max(float(allowed.min()), min(_EQUAL * float(allowed.min()), mean)))
    salt = zlib.crc32(prompt.tip)
    return max(map(int, equal), key=lambda at: (zlib.crc32(names[at].encode()) ^ salt, names[at]))


def _estimates(prompt: CachedPrompt, engines: EngineTable) -> tuple[Array, Integers]:
    """(engines, shares): seconds to the first token, and the chunks that the engine has then."""
    layout, rates = prompt.layout, engines.tokens_per_s[:, None]
    cached = np.minimum(engines.cached_tokens, prompt.tokens - 1)[:, None]
    own = cached // layout.chunk_tokens
    loadable = np.maximum(prompt.chunks - own, 0)
    takes = own + np.ceil(loadable * _SHARES).astype(np.int64)
    present = np.minimum(np.maximum(cached, takes * layout.chunk_tokens), prompt.tokens - 1)
    windows = (prompt.tokens - present) / (rates * layout.num_layers)
    transfers, requests_s = _transfers(prompt, engines, own, takes)
    loads = np.where(takes > own, prompt.fixed_s + requests_s, 0.0)
    return ttft_s(transfers, windows, layout.num_layers) + loads + engines.queued_tokens[:, None] / rates, takes


def _transfers(prompt: CachedPrompt, engines: EngineTable, own: Integers, takes: Integers) -> tuple[Array, Array]:
    """(engines, shares): seconds for a layer of the chunks that are loaded, and for the object tier's requests.

    Nodes of other hosts send side by side; so do those of the engine's own host, and the object tier.
    """
    size, cold = prompt.layout.slice_bytes, _between(_counts(prompt.objects.ranges, prompt.chunks), own, takes)
    held_chunks = takes - own - cold
    near_chunks, near_rate = np.zeros(takes.shape, dtype=np.int64), np.zeros((len(takes), 1))
    at_host: dict[str, list[int]] = {}
    for number, host in enumerate(engines.hosts):
        at_host.setdefault(host, []).append(number)
    for host, ranges in _by_host(prompt).items():
        if host and (at := at_host.get(host)):
            names = {run.node_id for run in ranges}
            colder = [run for run in prompt.objects.ranges if run.node_id in names]
            counts = _counts(ranges, prompt.chunks) - _counts(colder, prompt.chunks)
            near_chunks[at] = _between(counts, own[at], takes[at])
            near_rate[at] = sum(prompt.sources[name].bytes_per_s for name in names)
    rate = float(sum(source.bytes_per_s for source in prompt.sources.values()))
    far_s = (held_chunks - near_chunks) * (size / np.maximum(rate - near_rate, 1.0))
    together = np.maximum(far_s, near_chunks * (size / prompt.host_bytes_per_s))
    if not prompt.objects:
        return together, np.zeros(1)
    requests_s = prompt.objects.seconds(takes, 0)
    return np.maximum(together, prompt.objects.seconds(takes, size) - requests_s), requests_s


def _counts(ranges: Sequence[ChunkRange], chunks: int) -> Integers:
    """(chunks + 1,): how many of the first chunks are in the ranges."""
    marks = np.zeros(chunks + 1, dtype=np.int64)
    for run in ranges:
        marks[run.first + 1 : run.stop + 1] = 1
    return np.cumsum(marks)


def _between(counts: Integers, first: Integers, stop: Integers) -> Integers:
    """Return how many of chunks first … stop-1 are counted; both may be behind the last one."""
    last = len(counts) - 1
    return counts[np.minimum(stop, last)] - counts[np.minimum(first, last)]


def _by_host(prompt: CachedPrompt) -> dict[str, list[ChunkRange]]:
    """Ranges by the host of their node."""
    hosts: dict[str, list[ChunkRange]] = {}
    for run in prompt.ranges:
        hosts.setdefault(prompt.sources[run.node_id].host, []).append(run)
    return hosts
