"""Probes of engines: signs of life, models, and names of blocks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from quire.integrations.hints import HINTS
from quire.telemetry import logger
from quire_server.tasks import end
from quire_tools.router.block_names import BlockNaming
from quire_tools.router.engine import RoutedEngine
from quire_tools.router.requests import COMPLETIONS
from quire_tools.router.settings import RouterSettings

_PROBE_S: Final = 5.0
_DESCRIBE_S: Final = 30.0
_DESCRIBED_AGAIN_S: Final = 60.0
"""An engine that forgets its cache, as after new weights, gives its blocks other names."""
_PROBE_TOKEN: Final = 1
_PAUSE_S: Final = 0.2
"""Between two probes at least, however many requests fail."""


class Health:
    """Probes engines.

    Args:
        session: For the probes.
        headers: Of the probes.
        settings: Of the router.
    """

    def __init__(self, session: aiohttp.ClientSession, headers: Mapping[str, str], settings: RouterSettings) -> None:
        self._session = session
        self._headers = headers
        self._health_s = settings.health_s
        self._probe_s = min(_PROBE_S, settings.down_after_s)
        self._tenant_salt = settings.tenant_salt

    async def watch(self, engine: RoutedEngine) -> None:
        """Probe an engine until cancelled, and have it described anew from time to time."""
        learning: asyncio.Task[bool] | None = None
        learn_s = 0.0
        try:
            while True:
                engine.suspected.clear()
                if await self._lives(engine):
                    if learning is not None and learning.done():
                        learn_s = time.monotonic() + (_DESCRIBED_AGAIN_S if learning.result() else self._health_s)
                        learning = None
                    if learning is None and (not engine.is_up or time.monotonic() >= learn_s):
                        learning = asyncio.create_task(self._learn(engine))
                    if engine.models:
                        engine.came_up()
                await asyncio.sleep(min(_PAUSE_S, self._health_s))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._health_s):
                        await engine.suspected.wait()
        finally:
            await end([learning])

    async def _lives(self, engine: RoutedEngine) -> bool:
        """Return whether the engine answers a probe."""
        try:
            async with self._session.get(f"{engine.name}/health", timeout=_limit(self._probe_s)) as answer:
                engine.heard()  # also by a refusal: requests that it has may go on
                if answer.status == 200:
                    return True
                engine.refused(f"/health answers {answer.status}")
        except TimeoutError:
            engine.missed()
        except aiohttp.ClientConnectionError as error:
            engine.refused(str(error))
        except aiohttp.ClientError:
            engine.missed()
        return False

    async def _learn(self, engine: RoutedEngine) -> bool:
        """Learn the engine's models and the names of its blocks; return whether it described them.

        Until it does, those that it had before stand.
        """
        try:
            async with self._session.get(
                f"{engine.name}/v1/models", headers=self._headers, timeout=_limit(self._probe_s)
            ) as answer:
                answer.raise_for_status()
                records = (await answer.json())["data"]
            engine.models = {str(record["id"]): dict(record) for record in records}
            engine.came_up()
            engine.naming = await self._naming(engine)
        except Exception as error:  # whatever the engine answers, it is probed again
            logger().warning("engine is not described", engine=engine.name, error=repr(error))
            return False
        return True

    async def _naming(self, engine: RoutedEngine) -> BlockNaming | None:
        """Ask for one token of a prompt of one token, with the hint that has QuireConnector describe its blocks."""
        model = next((name for name in engine.models if not engine.has_adapter(name)), "")
        question: dict[str, Any] = {"model": model, "prompt": [_PROBE_TOKEN], "max_tokens": 1}
        question["kv_transfer_params"] = {HINTS: {"describe": True}}
        async with self._session.post(
            f"{engine.name}{COMPLETIONS}", json=question, headers=self._headers, timeout=_limit(_DESCRIBE_S)
        ) as answer:
            answer.raise_for_status()
            parameters = (await answer.json()).get("kv_transfer_params")
        return BlockNaming.of(parameters, self._tenant_salt) if isinstance(parameters, Mapping) else None


def _limit(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)
