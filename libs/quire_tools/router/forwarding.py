"""Sends requests to engines: to the best one, and to another one if that fails before its first token."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp import web

from quire.telemetry import counter, headers, logger, meter, names
from quire_tools.router.answers import AnswerRefused, Relay
from quire_tools.router.choice import Candidate, Choice
from quire_tools.router.disaggregation import PrefillLost, decode_body, prefilling
from quire_tools.router.engine import EngineLost, RoutedEngine
from quire_tools.router.prompts import Prompt, Tokenizer
from quire_tools.router.requests import GenerationRequest, RequestError
from quire_tools.router.settings import EngineRole, RouterSettings

_RETRY_AFTER_S: Final = 2
_PASSED: Final = ("Authorization", "Content-Type", "X-Request-Id", "Accept")
_NO_LIMIT: Final = aiohttp.ClientTimeout(total=None, connect=10.0)
"""An engine's first token takes as long as its queue; one that gives no sign of life is found by its probes."""


class Forwarding:
    """Every `forward` is one request.

    Args:
        session: For requests to engines.
        engines: All engines.
        choice: Orders engines.
        tokenizer: Asks engines for tokens.
        settings: Of the router.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engines: Sequence[RoutedEngine],
        choice: Choice,
        tokenizer: Tokenizer,
        settings: RouterSettings,
    ) -> None:
        self._session = session
        self._engines = engines
        self._choice = choice
        self._tokenizer = tokenizer
        self._settings = settings
        self._retries = counter(names.ROUTER_RETRIES, "1", "requests sent to another engine, as one failed")
        self._handovers = counter(
            names.ROUTER_HANDOVERS,
            "1",
            "prompts for prefill engines, by whether one computed them",
            [{"quire.outcome": outcome} for outcome in ("computed", "lost")],
        )
        self._first_token = meter().create_histogram(
            names.ROUTER_FIRST_TOKEN, "s", "time to first token", explicit_bucket_boundaries_advisory=names.SECONDS
        )

    def serving(self, model: str, *roles: EngineRole) -> list[RoutedEngine]:
        """Return the engines that are up, serve a model, and have one of the roles; all roles for none."""
        return [
            engine for engine in self._engines if engine.serves(model) and (not roles or engine.address.role in roles)
        ]

    async def forward(self, request: GenerationRequest, downstream: web.Request) -> web.StreamResponse:
        """Answer a request for a completion.

        Raises:
            RequestError: No engine serves the model, or none has answered.
            ClientGone: The client has closed its connection.
        """
        job = _Job(request, await self._prompt_of(request), downstream)
        failed: list[EngineLost] = []
        while len(failed) <= self._settings.retries and (engines := self._answering(request.model, failed)):
            try:
                return await self._attempt(job, engines)
            except PrefillLost:
                job.may_hand_over = False
                self._handovers.add(1, {"quire.outcome": "lost"})
            except EngineLost as error:
                failed.append(error)
                self._retries.add(1)
        return _last_answer(failed)

    async def pass_on(self, downstream: web.Request, model: str, body: bytes) -> web.StreamResponse:
        """Answer a request of another path by the engine with the fewest requests. Raises as `forward`."""
        if not self.serving(model):
            raise self._nobody(model)
        request = GenerationRequest(path=downstream.path_qs, body={}, raw=body, headers=downstream.headers)
        job = _Job(request, Prompt(tokens=(), length=0), downstream)
        failed: list[EngineLost] = []
        while len(failed) <= self._settings.retries and (engines := self._answering(model, failed)):
            engine = min(engines, key=lambda engine: engine.requests)
            try:
                with engine.request(0):
                    return await self._send(job, engine, body, lambda: None)
            except EngineLost as error:
                failed.append(error)
                self._retries.add(1)
        return _last_answer(failed)

    async def _prompt_of(self, request: GenerationRequest) -> Prompt:
        engines = self.serving(request.model)
        if not engines:
            raise self._nobody(request.model)
        return await self._tokenizer.prompt_of(request, min(engines, key=lambda engine: engine.requests))

    def _nobody(self, model: str) -> RequestError:
        if any(engine.is_up for engine in self._engines):
            return RequestError(404, f"no engine that is up serves {model!r}", "model")
        return RequestError(503, "no engine is up", retry_after_s=_RETRY_AFTER_S)

    def _answering(self, model: str, failed: Sequence[EngineLost]) -> list[RoutedEngine]:
        """Return the engines that may answer and have not failed."""
        failed_engines = {error.engine for error in failed}
        return [
            engine for engine in self.serving(model, EngineRole.BOTH, EngineRole.DECODE) if engine not in failed_engines
        ]

    async def _attempt(self, job: _Job, engines: Sequence[RoutedEngine]) -> web.StreamResponse:
        """Send a request to the best engine, and its prompt to the best prefill engine where there are such."""
        best = (await self._choice.order(job.prompt, engines))[0]
        prefill = await self._prefill_candidates(job, best)
        if not prefill:
            with best.engine.request(best.to_compute(job.prompt)) as queued:

                def on_first() -> None:
                    queued.first_token()
                    self._first_token.record(job.seconds)

                return await self._send(job, best.engine, job.request.raw, on_first)
        with best.engine.request(1):
            async with prefilling(job.request, job.prompt, prefill, self._ask_prefill(job)) as has_answered:

                def on_answer() -> None:
                    has_answered()
                    self._handovers.add(1, {"quire.outcome": "computed"})
                    self._first_token.record(job.seconds)

                return await self._send(job, best.engine, decode_body(job.request), on_answer)

    async def _prefill_candidates(self, job: _Job, answering: Candidate) -> list[Candidate]:
        """Return the prefill engines to try in turn; none where the decode engine is to compute the prompt itself."""
        small = answering.to_compute(job.prompt) < self._settings.prefill_tokens_min
        if small or not job.may_hand_over or not job.request.can_be_handed_over:
            return []
        naming = answering.engine.naming
        engines = [
            engine
            for engine in self.serving(job.request.model, EngineRole.PREFILL)
            if naming is not None and engine.naming is not None and engine.naming.digest == naming.digest
        ]
        return (await self._choice.order(job.prompt, engines))[: 1 + self._settings.retries] if engines else []

    def _ask_prefill(self, job: _Job) -> Callable[[RoutedEngine, bytes], Awaitable[None]]:
        """Return what sends a request to a prefill engine and waits for its answer; it raises `EngineLost`."""

        async def ask(engine: RoutedEngine, body: bytes) -> None:
            try:
                async with engine.while_up(), self._post(job, engine, body) as answer:
                    await answer.read()
                    if answer.status != 200:
                        raise EngineLost(engine, f"answers {answer.status}")
            except aiohttp.ClientError as error:
                raise EngineLost(engine, repr(error)) from error

        return ask

    async def _send(
        self, job: _Job, engine: RoutedEngine, body: bytes, on_first: Callable[[], None]
    ) -> web.StreamResponse:
        """Send a request to an engine and its answer to the client. Raises as `Relay.send`."""
        relay = Relay(job.downstream, on_first)
        try:
            async with engine.while_up(), self._post(job, engine, body) as answer:
                return await relay.send(engine, answer)
        except (aiohttp.ClientError, EngineLost) as error:
            engine.suspected.set()
            if relay.has_begun:
                return await relay.break_off(engine, error)
            logger().warning("engine failed before its first token", engine=engine.name, error=str(error))
            if isinstance(error, EngineLost):
                raise
            raise EngineLost(engine, repr(error)) from error

    def _post(self, job: _Job, engine: RoutedEngine, body: bytes) -> Any:
        passed = {name: job.downstream.headers[name] for name in _PASSED if name in job.downstream.headers}
        return self._session.request(
            job.downstream.method,
            f"{engine.name}{job.request.path}",
            data=body,
            headers={**passed, **headers()},
            timeout=_NO_LIMIT,
        )


@dataclass(slots=True)
class _Job:
    """A request on its way. `may_hand_over`: whether prefill engines may compute its prompt."""

    request: GenerationRequest
    prompt: Prompt
    downstream: web.Request
    may_hand_over: bool = True
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self.began_s


def _last_answer(failed: Sequence[EngineLost]) -> web.Response:
    """Return the last answer of an engine. Raises `RequestError` where none has answered."""
    answers = [error.answer for error in failed if isinstance(error, AnswerRefused)]
    if answers:
        return answers[-1]
    raise RequestError(503, f"{len(failed)} engines were tried, none has answered", retry_after_s=_RETRY_AFTER_S)
