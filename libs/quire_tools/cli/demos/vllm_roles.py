"""The second part of `quire demo-vllm`: a prefill engine and a decode engine behind the router; one is killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.model.errors import InternalError
from quire_tools.engines.server import EngineServer, complete, engine_server
from quire_tools.local.ports import free_ports

_KILL_AFTER_S: Final = 0.1
_LOOK_S: Final = 0.2
_UP: Final = 'quire_role="{role}",quire_state="up"'


@dataclass(frozen=True, slots=True)
class Routed:
    """An answer through the router. `took_s`: until the first token; `cached`: tokens that were loaded."""

    tokens: list[int]
    cached: int
    took_s: float


class EnginesBehindRouter:
    """A prefill engine, a decode engine, and `quire router` in front of them.

    Args:
        model: Folder of the model.
        folder: For the logs.
        gateway: Address of Quire's gateway.
        context: Longest sequence, tokens.
        cache_bytes: Memory of an engine for its KV cache.
    """

    def __init__(self, model: Path, folder: Path, gateway: str, context: int, cache_bytes: int) -> None:
        self._model, self._folder, self._gateway = model, folder, gateway
        self._context, self._cache_bytes = context, cache_bytes
        self._url = ""

    @contextmanager
    def running(self) -> Iterator[EngineServer]:
        """Run them during the block; the prefill engine, to be killed. Raises `InternalError` if one ends."""
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        with ExitStack() as stack:
            prefill, decode = (
                stack.enter_context(
                    engine_server(
                        self._model,
                        self._folder / f"engine-{name}.log",
                        gateway=self._gateway,
                        role=role,
                        context=self._context,
                        cache_bytes=self._cache_bytes,
                    )
                )
                for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
            )
            for server in (prefill, decode):
                server.ready()
            command = [str(Path(sys.executable).with_name("quire")), "router", "--listen", f"127.0.0.1:{port}"]
            command += ["--prefill", prefill.url, "--decode", decode.url, "--gateway", self._gateway]
            log = stack.enter_context((self._folder / "router.log").open("w"))
            router = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
            stack.callback(router.terminate)
            self._until_both_are_up(router)
            yield prefill

    def ask(self, prompt: Sequence[int], count: int) -> Routed:
        """Ask for the first token, then for `count` of them."""
        began_s = time.monotonic()
        first = complete(self._url, prompt, 1)
        took_s = time.monotonic() - began_s
        cached = (first["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Routed(complete(self._url, prompt, count)["choices"][0]["token_ids"], cached, took_s)

    def _until_both_are_up(self, router: subprocess.Popen[bytes]) -> None:
        while router.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as answer:
                    lines = answer.read().decode().splitlines()
            except OSError:
                lines = []
            up = [line for line in lines if line.startswith("quire_router_engines") and line.endswith(" 1.0")]
            if all(any(_UP.format(role=role) in line for line in up) for role in ("prefill", "decode")):
                return
            time.sleep(_LOOK_S)
        raise InternalError(f"the router has ended with {router.returncode}; see {self._folder}/router.log")


@contextmanager
def killed_soon(server: EngineServer) -> Iterator[None]:
    """Kill an engine shortly after the block has begun."""
    timer = threading.Timer(_KILL_AFTER_S, server.kill)
    timer.start()
    try:
        yield
    finally:
        timer.join()
