"""The order in which engines are tried: by the time to first token that each is expected to have."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from quire.client import AsyncClient
from quire.integrations.circuit_breaker import CircuitBreaker
from quire.model.assignment import Engine
from quire.model.errors import QuireError
from quire.telemetry import counter, names
from quire_tools.router.block_names import BlockNaming
from quire_tools.router.engine import RoutedEngine
from quire_tools.router.prompts import Prompt
from quire_tools.router.settings import RouterSettings

_AWAY_S: Final = 2.0
_BEGINNING_TOKENS: Final = 64
_EQUAL: Final = 1.1
"""Times that differ by less are equal: rates are measured, and queues estimated."""
_WAYS: Final = ("assign", "queues")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An engine that may compute a prompt.

    Attributes:
        engine: The engine.
        cached_tokens: Tokens from the start of the prompt that it has, or loads.
        tokens_per_s: Its prefill rate; where it was not measured, the mean of the others.
    """

    engine: RoutedEngine
    cached_tokens: int
    tokens_per_s: float

    def to_compute(self, prompt: Prompt) -> int:
        """Return how many tokens of the prompt it does not have; the last one is always computed."""
        return max(1, prompt.length - self.cached_tokens)


class Choice:
    """Orders engines.

    Args:
        client: Of Quire; None to choose by queues and KV events alone.
        settings: Of the router.
    """

    def __init__(self, client: AsyncClient | None, settings: RouterSettings) -> None:
        self._client = client
        self._assign_s = settings.assign_s
        self._tokens_per_s = settings.tokens_per_s
        self._quire_is_away = CircuitBreaker(_AWAY_S, "router")
        self._ways = counter(
            names.ROUTER_CHOICES, "1", "engines chosen, by the way", [{"quire.way": way} for way in _WAYS]
        )

    async def order(self, prompt: Prompt, engines: Sequence[RoutedEngine]) -> list[Candidate]:
        """Return the engines, the one to try first in front."""
        rates = [engine.measured_tokens_per_s for engine in engines if engine.measured_tokens_per_s]
        usual = sum(rates) / len(rates) if rates else self._tokens_per_s
        candidates = [
            Candidate(
                engine=engine,
                cached_tokens=_cached_tokens(engine, prompt),
                tokens_per_s=engine.measured_tokens_per_s or usual,
            )
            for engine in engines
        ]
        ordered = await self._assigned(prompt, candidates)
        self._ways.add(1, {"quire.way": "queues" if ordered is None else "assign"})
        return ordered if ordered is not None else _by_queues(prompt, candidates)

    async def _assigned(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Candidate] | None:
        """Order by Quire's answer; None without one, or where Quire cannot have blocks of the prompt."""
        naming = _most_frequent(candidates)
        if self._client is None or naming is None or prompt.adapter or self._quire_is_away or len(candidates) < 2:
            return None
        keys = await prompt.keys(naming)
        if not len(keys):
            return None
        comparable = [candidate for candidate in candidates if candidate.engine.naming == naming]
        try:
            async with asyncio.timeout(self._assign_s):
                answer = await self._client.assign(
                    naming.namespace, keys, prompt.length, [_described(candidate) for candidate in comparable]
                )
        except (QuireError, TimeoutError) as error:
            self._quire_is_away.failed(error)
            return None
        self._quire_is_away.answered()
        if len(answer.ttft_s) != len(comparable) or answer.engine not in {
            candidate.engine.name for candidate in comparable
        }:
            return None
        times = {candidate.engine.name: ttft_s for candidate, ttft_s in zip(comparable, answer.ttft_s, strict=True)}
        times[answer.engine] = -1.0
        remaining = [candidate for candidate in candidates if candidate.engine.naming != naming]
        comparable.sort(key=lambda candidate: times[candidate.engine.name])
        taken = min(answer.take_chunks * naming.namespace.layout.chunk_tokens, prompt.length)
        comparable[0] = replace(comparable[0], cached_tokens=max(comparable[0].cached_tokens, taken))
        return comparable + _by_queues(prompt, remaining)


def _cached_tokens(engine: RoutedEngine, prompt: Prompt) -> int:
    if engine.blocks is None or not prompt.tokens:
        return 0
    return engine.blocks.cached_tokens(prompt.digests)


def _by_queues(prompt: Prompt, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order by the seconds until each has computed its queue and the prompt.

    Of engines with about equal times the one with the fewest requests comes first, then the one with the strongest
    claim: prompts with one beginning, which it may have in its memory, go to the same one.
    """

    def wait_s(candidate: Candidate) -> float:
        return (candidate.engine.queued_tokens + candidate.to_compute(prompt)) / candidate.tokens_per_s

    def place(candidate: Candidate) -> tuple[float, int, bytes]:
        claim = hashlib.blake2b(candidate.engine.name.encode() + beginning, digest_size=8).digest()
        return max(wait_s(candidate), equal_s), candidate.engine.requests, claim

    beginning = repr(list(prompt.tokens[:_BEGINNING_TOKENS])).encode()
    equal_s = _EQUAL * min(map(wait_s, candidates), default=0.0)
    return sorted(candidates, key=place)


def _most_frequent(candidates: Sequence[Candidate]) -> BlockNaming | None:
    """Return the naming that most engines share; None where none has said."""
    namings = Counter(candidate.engine.naming for candidate in candidates if candidate.engine.naming is not None)
    return namings.most_common(1)[0][0] if namings else None


def _described(candidate: Candidate) -> Engine:
    engine = candidate.engine
    return Engine(
        name=engine.name,
        host=engine.address.host,
        cached_tokens=candidate.cached_tokens,
        queued_tokens=engine.queued_tokens,
        tokens_per_s=candidate.tokens_per_s,
    )
