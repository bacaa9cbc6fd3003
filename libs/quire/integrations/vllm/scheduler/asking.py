"""Look-ups that run while vLLM goes on: begun, answered, given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from quire.client import Client
from quire.integrations.circuit_breaker import CircuitBreaker
from quire.integrations.vllm.contents import ContentNames, ModelContents
from quire.integrations.vllm.scheduler.lookups import Query, RequestMatch, let_go, look_up
from quire.integrations.vllm.scheduler.requests import BlockNames, State
from quire.integrations.vllm.settings import Settings
from quire.telemetry import logger, within

_FRESH_S: Final = 30.0


class Asking:
    """Runs the look-ups of one engine's requests, without blocking the scheduler.

    Args:
        settings: As the user set them.
        client: Client of the cluster.
        blocks: Names of the requests' blocks.
        contents: Names of contents that vLLM's hashes do not name.
        count: Adds to a figure.
        now_s: Monotonic clock, seconds.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        client: Client,
        blocks: BlockNames,
        contents: ContentNames,
        count: Callable[[str, float], None],
        now_s: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._client = client
        self._blocks = blocks
        self._names = contents
        self._count = count
        self._now_s = now_s
        self._absence = CircuitBreaker(settings.away_s, "vLLM", now_s)

    def begin(self, state: State) -> None:
        """Begin with a new request: digest its contents where vLLM's hashes do not name them, then look it up."""
        request = state.request
        if request.lora_request is None and not request.mm_features:
            state.contents = ModelContents()
            self.ask(state)
        else:
            state.asked_s = self._now_s()
            state.naming = self._client.spawn(asyncio.to_thread(self._names.of, request))

    def is_fresh(self, state: State) -> bool:
        """Return whether the leases of a request last for a load that begins now."""
        return self._now_s() - state.asked_s <= _FRESH_S

    def ask(self, state: State) -> None:
        """Begin the look-ups of a request whose contents have names."""
        state.asked_s = self._now_s()
        counts = [self._blocks.count(state, group) for group in self._blocks.groups]
        if not all(counts):
            state.nothing_stored(storable=True)
            return
        if self._absence:
            return  # `is_answered` makes it a miss
        queries = []
        for group, count in zip(self._blocks.groups, counts, strict=True):
            keys = self._blocks.keys(state, group, count)
            queries.append(Query(group, tuple(zip(self._blocks.spaces(state, group), keys, strict=True))))
        tokens_max = state.request.num_tokens - 1
        state.asking = self._client.spawn(within(state.trace, look_up, self._client, queries, tokens_max))

    def ask_again(self, state: State) -> None:
        """Begin the look-ups anew, or wait anew for the names."""
        self.give_back(state)
        state.answered = False
        if state.contents is not None or state.naming is None:
            self.ask(state)
        else:
            state.asked_s = self._now_s()

    def is_answered(self, state: State) -> bool:
        """Return whether the look-ups have ended. Failures, and look-ups that take too long, are a miss."""
        if state.contents is None and not self._is_named(state):
            return state.answered
        if state.answered:
            return True
        if state.asking is None:
            state.nothing_stored(storable=False)
            return True
        if not state.asking.done():
            if self._now_s() - state.asked_s < self._settings.lookup_timeout_s:
                return False
            _when_done(state.asking, self._release_all)
            self._failed(state, TimeoutError("no answer in time"))
            return True
        error = state.asking.exception()
        if error is not None:
            self._failed(state, error)
            return True
        self._count("lookups", 1)
        self._absence.answered()
        matches, state.asking, state.answered = state.asking.result(), None, True
        for part, match in zip(state.parts, matches, strict=True):
            part.match, part.states, part.storable = match, set(match.states), True
            part.stored = part.looked_up = match.end
        if not all(match.end for match in matches):
            self.give_back(state)
        return True

    def _is_named(self, state: State) -> bool:
        """Return whether the contents have names. Requests without names, and with slow ones, are a miss."""
        if state.naming is None:
            state.nothing_stored(storable=False)
            return False
        if not state.naming.done():
            if self._now_s() - state.asked_s >= self._settings.lookup_timeout_s:
                self._names.distrust(state.request)
                state.nothing_stored(storable=False)
            return False
        naming, state.naming = state.naming, None
        error = naming.exception()
        if error is None:
            state.contents = naming.result()
            self.ask(state)
            return True
        state.nothing_stored(storable=False)
        logger().warning("a request is not cached", request=state.request.request_id, reason=str(error) or repr(error))
        return False

    def _failed(self, state: State, error: BaseException) -> None:
        state.asking = None
        state.nothing_stored(storable=False)
        self._count("failed_lookups", 1)
        self._absence.failed(error)

    def give_back(self, state: State) -> None:
        """Release the leases of a request, also of look-ups that still run."""
        if state.asking is not None:
            _when_done(state.asking, self._release_all)
            state.asking = None
        for part in state.parts:
            if part.match is not None:
                self.release(part.match)
            part.match = None

    def release(self, match: RequestMatch) -> None:
        """Release the leases on the blocks of one group."""
        for lookup in match.shards:
            if lookup.lease:
                self._client.spawn(let_go(self._client, lookup))

    def _release_all(self, matches: Sequence[RequestMatch]) -> None:
        for match in matches:
            self.release(match)


def _when_done(asking: Future[tuple[RequestMatch, ...]], then: Callable[[Sequence[RequestMatch]], None]) -> None:
    asking.add_done_callback(lambda done: None if done.cancelled() or done.exception() else then(done.result()))
