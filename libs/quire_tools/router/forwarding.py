"""Sends requests to engines: to the best one, and to another one if that fails before its first token."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp import web
from yarl import URL

from quire.telemetry import counter, headers, logger, meter, names
from quire_tools.router.answers import AnswerRefused, Relay
from quire_tools.router.choice import Candidate, Choice
from quire_tools.router.disaggregation import PrefillLost, decode_body, prefilling
from quire_tools.router.engine import EngineLost, QueuedPrompt, RoutedEngine
from quire_tools.router.prompts import Prompt, Tokenizer
from quire_tools.router.requests import REQUEST_ID, REQUEST_ID_HEADER, GenerationRequest, RequestError
from quire_tools.router.settings import EngineRole, RouterSettings

_RETRY_AFTER_S: Final = 2
_PASSED: Final = ("Authorization", "Content-Type", "Accept")
_IDLE_CLOSED_S: Final = 0.5
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
            "prompts for prefill engines: the decode engine answered, or no prefill engine computed it",
            [{"quire.outcome": outcome} for outcome in ("answered", "lost")],
        )
        self._first_token = meter().create_histogram(
            names.ROUTER_FIRST_TOKEN,
            "s",
            "time to first token of streams",
            explicit_bucket_boundaries_advisory=names.SECONDS,
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
        job = _Job(request, downstream)
        engines = self.serving(request.model)
        if not engines:
            raise self._nobody(request.model)
        prompt = await self._tokenizer.prompt_of(request, engines)
        failed: list[EngineLost] = []
        best = await self._best(job, prompt, failed)
        prefill = await self._prefill_candidates(job, prompt, best) if best is not None else []
        if prefill:
            try:
                # The prompt is computed once: a decode engine that takes another one's place finds its blocks.
                async with prefilling(request, prompt, prefill, self._ask_prefill(job)) as has_answered:
                    return await self._answer(job, prompt, best, failed, has_answered)
            except PrefillLost:
                self._handovers.add(1, {"quire.outcome": "lost"})
                best = await self._best(job, prompt, failed)
        return await self._answer(job, prompt, best, failed, None)

    async def pass_on(self, downstream: web.Request, model: str, body: bytes) -> web.StreamResponse:
        """Answer a request of another path by the engine with the fewest requests.

        Another engine is tried if the connection fails, and not if the engine refuses: the request may have effects.
        Raises as `forward`.
        """
        if not self.serving(model):
            raise self._nobody(model)
        job = _Job(
            GenerationRequest(path=downstream.raw_path, body={}, raw=body, headers=downstream.headers), downstream
        )
        failed: list[EngineLost] = []
        while remaining := self._remaining(model, failed):
            engine = min(remaining, key=lambda engine: engine.requests)
            try:
                with engine.request(0):
                    return await self._send(job, engine, body, lambda is_stream: None)
            except AnswerRefused as error:
                return error.answer
            except EngineLost as error:
                failed.append(error)
        return _last_answer(failed)

    def _nobody(self, model: str) -> RequestError:
        if any(engine.is_up for engine in self._engines):
            return RequestError(404, f"no engine that is up serves {model!r}", "model")
        return RequestError(503, "no engine is up", retry_after_s=_RETRY_AFTER_S)

    def _remaining(self, model: str, failed: Sequence[EngineLost]) -> list[RoutedEngine]:
        """Return the engines to try next: those that may answer and have not failed, none after the last retry."""
        if len(failed) > self._settings.retries:
            return []
        engines = self.serving(model, EngineRole.BOTH, EngineRole.DECODE)
        remaining = [engine for engine in engines if all(engine is not error.engine for error in failed)]
        if failed and remaining:
            self._retries.add(1)
        return remaining

    async def _best(self, job: _Job, prompt: Prompt, failed: Sequence[EngineLost]) -> Candidate | None:
        """Return the engine to try next; None if there is none."""
        remaining = self._remaining(job.request.model, failed)
        return (await self._choice.order(prompt, remaining))[0] if remaining else None

    async def _answer(
        self,
        job: _Job,
        prompt: Prompt,
        best: Candidate | None,
        failed: list[EngineLost],
        has_answered: Callable[[], None] | None,
    ) -> web.StreamResponse:
        """Send a request to the best engine, and to others until one answers.

        Args:
            job: The request.
            prompt: Its prompt.
            best: The engine to try first; None for none.
            failed: Engines that have failed; others are added.
            has_answered: Called with the first token, if a prefill engine computes the prompt; None if none does.
        """
        naming = best.engine.naming if best is not None else None
        while best is not None:
            is_handed_over = has_answered is not None and best.engine.naming == naming
            tokens = 1 if is_handed_over else best.to_compute(prompt)
            body = decode_body(job.request) if is_handed_over else job.request.raw
            with best.engine.request(tokens) as queued:

                def on_first(is_stream: bool, queued: QueuedPrompt = queued) -> None:
                    if has_answered is not None:
                        has_answered()
                        self._handovers.add(1, {"quire.outcome": "answered"})
                    if is_stream:
                        queued.first_token()
                        self._first_token.record(job.seconds)
                    queued.end()

                try:
                    return await self._send(job, best.engine, body, on_first)
                except EngineLost as error:
                    failed.append(error)
            best = await self._best(job, prompt, failed)
        return _last_answer(failed)

    async def _prefill_candidates(self, job: _Job, prompt: Prompt, answering: Candidate) -> list[Candidate]:
        """Return the prefill engines to try in turn; none where the decode engine is to compute the prompt itself."""
        small = answering.to_compute(prompt) < self._settings.prefill_tokens_min
        if small or not job.request.can_be_handed_over:
            return []
        naming = answering.engine.naming
        engines = [
            engine
            for engine in self.serving(job.request.model, EngineRole.PREFILL)
            if naming is not None and engine.naming is not None and engine.naming.digest == naming.digest
        ]
        return (await self._choice.order(prompt, engines))[: 1 + self._settings.retries] if engines else []

    def _ask_prefill(self, job: _Job) -> Callable[[RoutedEngine, bytes], Awaitable[None]]:
        """Return what sends a request to a prefill engine and waits for its answer; it raises `EngineLost`."""

        async def ask(engine: RoutedEngine, body: bytes) -> None:
            try:
                async with engine.while_up(), self._post(job, engine, body) as answer:
                    await answer.read()
                    if answer.status != 200:
                        raise EngineLost(engine, f"answers {answer.status}")
            except (aiohttp.ClientError, TimeoutError) as error:
                engine.suspected.set()
                raise EngineLost(engine, repr(error)) from error

        return ask

    async def _send(
        self, job: _Job, engine: RoutedEngine, body: bytes, on_first: Callable[[bool], None]
    ) -> web.StreamResponse:
        """Send a request to an engine and its answer to the client. Raises as `Relay.send`."""
        relay, began_s = Relay(job.downstream, on_first), time.perf_counter()
        try:
            async with engine.while_up():
                try:
                    return await self._exchange(job, engine, body, relay)
                except aiohttp.ServerDisconnectedError:
                    if relay.has_begun or time.perf_counter() - began_s > _IDLE_CLOSED_S:
                        raise
                    # The engine may have closed an idle connection while the request was on its way.
                    return await self._exchange(job, engine, body, relay)
        except AnswerRefused:
            raise
        except (aiohttp.ClientError, EngineLost) as error:
            engine.suspected.set()
            if relay.has_begun:
                return await relay.break_off(engine, error)
            logger().warning("engine failed before its first token", engine=engine.name, error=str(error))
            if isinstance(error, EngineLost):
                raise
            raise EngineLost(engine, repr(error)) from error

    async def _exchange(self, job: _Job, engine: RoutedEngine, body: bytes, relay: Relay) -> web.StreamResponse:
        async with self._post(job, engine, body) as answer:
            return await relay.send(engine, answer)

    def _post(self, job: _Job, engine: RoutedEngine, body: bytes) -> Any:
        passed = {name: job.downstream.headers[name] for name in _PASSED if name in job.downstream.headers}
        return self._session.request(
            job.downstream.method,
            URL(f"{engine.name}{job.request.path}", encoded=True),
            data=body,
            headers={REQUEST_ID_HEADER: job.downstream[REQUEST_ID], **passed, **headers()},
            timeout=_NO_LIMIT,
            allow_redirects=False,
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """A request on its way."""

    request: GenerationRequest
    downstream: web.Request
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
