"""A prompt that a prefill engine computes while a decode engine already receives its blocks through Quire.

Both engines are asked at once. The decode engine finds the blocks by their names, whichever engine stores them: when a
prefill engine fails, the next one takes its place, and the decode engine goes on waiting. When a decode engine fails,
the prompt is computed on: another one finds the same blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from quire.integrations.hints import HINTS
from quire.telemetry import logger
from quire_tools.router.choice import Candidate
from quire_tools.router.engine import EngineLost, RoutedEngine
from quire_tools.router.prompts import Prompt
from quire_tools.router.requests import CHAT, GenerationRequest

_TO_PREFILL: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
"""`kv_transfer_params` as proxies for vLLM's connectors send them to a prefill engine."""
Prefill = Callable[[RoutedEngine, bytes], Awaitable[None]]
"""Sends a request to a prefill engine and waits for its answer; raises `EngineLost`."""


class PrefillLost(Exception):
    """No prefill engine has computed the prompt."""


@contextlib.asynccontextmanager
async def prefilling(
    request: GenerationRequest, prompt: Prompt, candidates: Sequence[Candidate], send: Prefill
) -> AsyncIterator[Callable[[], None]]:
    """Have a prefill engine compute a prompt during the block.

    Args:
        request: The client's request.
        prompt: Its prompt.
        candidates: Prefill engines, the one to try first in front.
        send: Sends a request to one of them.

    Yields:
        A function to call when the decode engine has its first token, and needs the prefill engine no longer.

    Raises:
        PrefillLost: All of them failed before that.
    """
    needed = True

    def has_answered() -> None:
        nonlocal needed
        needed = False
        if not wait.expired():
            wait.reschedule(None)  # of a prefill engine that failed in this very turn of the loop

    try:
        async with asyncio.timeout(None) as wait:
            task = asyncio.create_task(_prefill(request, prompt, candidates, send))

            def look(ended: asyncio.Task[bool]) -> None:
                if ended.cancelled() or not needed or wait.expired():
                    return
                if (error := ended.exception()) is not None:
                    logger().error("prefill failed unexpectedly", exc_info=error)
                if error is not None or not ended.result():
                    wait.reschedule(asyncio.get_running_loop().time())

            task.add_done_callback(look)
            try:
                yield has_answered
            finally:
                needed = False
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    except TimeoutError:
        if not wait.expired():
            raise
        raise PrefillLost from None


async def _prefill(request: GenerationRequest, prompt: Prompt, candidates: Sequence[Candidate], send: Prefill) -> bool:
    """Return whether an engine has computed the prompt."""
    body = _prefill_body(request)
    for candidate in candidates:
        engine = candidate.engine
        try:
            with engine.request(candidate.to_compute(prompt)) as queued:
                await send(engine, body)
                queued.first_token()
            return True
        except EngineLost as error:
            logger().warning("prefill engine failed", engine=engine.name, reason=error.reason)
    return False


def decode_body(request: GenerationRequest) -> bytes:
    """Return the request for the engine that answers; the hints are for it, as it ends last."""
    hints = {HINTS: request.hints} if request.hints else {}
    return request.with_parameters({"do_remote_prefill": True, "do_remote_decode": False, **hints})


def _prefill_body(request: GenerationRequest) -> bytes:
    """Return the request for one token of the same prompt, whole and not streamed."""
    changes: dict[str, Any] = {"stream": None, "stream_options": None, "n": None, "min_tokens": None, "max_tokens": 1}
    if request.path == CHAT and request.body.get("max_completion_tokens") is not None:
        changes["max_completion_tokens"] = 1
    return request.with_parameters(_TO_PREFILL, **changes)
