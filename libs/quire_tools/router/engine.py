"""State of an engine: whether it answers, its models, its queue, its rate, and the names of its blocks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

from quire.telemetry import logger
from quire_tools.router.block_names import BlockNaming
from quire_tools.router.known_blocks import KnownBlocks
from quire_tools.router.settings import EngineAddress

_RATE_WEIGHT: Final = 0.2
_MEASURED_TOKENS_MIN: Final = 64
"""Of shorter prompts the time is that of a step, and says nothing of the rate."""
_RATE_MIN: Final = 1.0


class EngineLost(Exception):
    """An engine failed, or gave no sign of life.

    Args:
        engine: The engine.
        reason: For the log.
    """

    def __init__(self, engine: RoutedEngine, reason: str) -> None:
        super().__init__(f"{engine.name}: {reason}")
        self.engine, self.reason = engine, reason


class QueuedPrompt:
    """A prompt that an engine computes.

    Args:
        engine: The engine.
        tokens: Tokens to compute.
    """

    def __init__(self, engine: RoutedEngine, tokens: int) -> None:
        self._engine = engine
        self._tokens = tokens
        self._measured = engine.blocks is not None and not engine.queued_tokens and tokens >= _MEASURED_TOKENS_MIN
        self._began_s = time.monotonic()
        self._ended = False
        engine.queued_tokens += tokens

    def first_token(self) -> None:
        """Note that the prompt is computed.

        A prompt that was alone in the queue measures the rate, if KV events gave the length of its cached part.
        """
        if not self._ended and self._measured:
            self._engine.measured(self._tokens / max(time.monotonic() - self._began_s, 1e-6))
        self.end()

    def end(self) -> None:
        """Remove the prompt from the engine's queue."""
        if not self._ended:
            self._ended = True
            self._engine.queued_tokens -= self._tokens


class RoutedEngine:
    """An engine that requests can be sent to.

    Args:
        address: Its address.
        down_after_s: Seconds without a sign of life after which it counts as down.
    """

    def __init__(self, address: EngineAddress, down_after_s: float) -> None:
        self.address = address
        self.measured_tokens_per_s = 0.0
        """Its prefill rate; 0 before a prompt has measured it."""
        self.queued_tokens = 0
        """Tokens of prompts that have no token yet."""
        self.requests = 0
        """Requests that this router has sent and that have not ended."""
        self.models: Mapping[str, Mapping[str, Any]] = {}
        """The models that it serves, by name, as its `/v1/models` describes them."""
        self.naming: BlockNaming | None = None
        """Names of its blocks in Quire; None where it has not said."""
        self.blocks = KnownBlocks() if address.events else None
        """Blocks in its own memory, where it publishes KV events."""
        self.suspected = asyncio.Event()
        """Set by a request that failed there: it is probed at once."""
        self.is_up = False
        self._down_after_s = down_after_s
        self._heard_s = time.monotonic()
        self._waits: set[asyncio.Timeout] = set()

    @property
    def name(self) -> str:
        """URL of the engine, which names it."""
        return self.address.url

    def has_adapter(self, model: str) -> bool:
        """Return whether a model is an adapter: vLLM names its parent."""
        return bool(self.models.get(model, {}).get("parent"))

    def serves(self, model: str) -> bool:
        """Return whether requests for a model can be sent to it; any model, where it is not named."""
        return self.is_up and (not model or model in self.models)

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard_s = time.monotonic()

    def came_up(self) -> None:
        """Note that the engine answers. Blocks that it had before may be gone."""
        self.heard()
        if not self.is_up:
            self.is_up = True
            if self.blocks is not None:
                self.blocks.clear()
            logger().info("engine is up", engine=self.name, models=sorted(self.models))

    def refused(self, reason: str) -> None:
        """Send the engine no requests until it answers again. Those that it has may go on: it may be stopping."""
        if self.is_up:
            self.is_up = False
            logger().warning("engine is down", engine=self.name, reason=reason, requests=self.requests)
        self.missed()

    def missed(self) -> None:
        """Note an unanswered probe: after `down_after_s` without a sign of life the engine's requests are given up."""
        if time.monotonic() - self._heard_s < self._down_after_s:
            return
        if self.is_up:
            self.is_up = False
            logger().warning("engine is down", engine=self.name, reason="no sign of life", requests=self.requests)
        now_s = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now_s)

    @contextlib.contextmanager
    def request(self, tokens: int) -> Iterator[QueuedPrompt]:
        """Count a request while it runs. `tokens`: of its prompt, to compute."""
        self.requests += 1
        queued = QueuedPrompt(self, tokens)
        try:
            yield queued
        finally:
            queued.end()
            self.requests -= 1

    @contextlib.asynccontextmanager
    async def while_up(self) -> AsyncIterator[None]:
        """End the block by `EngineLost` when the engine gives no sign of life."""
        if not self.is_up:
            raise EngineLost(self, "is down")
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if wait.expired():
                raise EngineLost(self, "gives no sign of life") from None
            raise

    def measured(self, tokens_per_s: float) -> None:
        """Take a measured prefill rate into account."""
        mean = self.measured_tokens_per_s or tokens_per_s
        self.measured_tokens_per_s = max(mean + _RATE_WEIGHT * (tokens_per_s - mean), _RATE_MIN)
