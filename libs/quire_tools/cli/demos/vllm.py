"""`quire demo-vllm`: vLLM processes share a prefix through Quire, and one prefills for another; two processes die.

Real vLLM on this machine's CPU, a Llama of random weights: its compute is real, its words are not. Each engine is a
process of its own; greedy tokens with Quire have to be those of one without it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.client import Client
from quire.model.errors import InternalError
from quire.model.nodes import Role
from quire.transport import OFF
from quire_tools.cli.demos.vllm_roles import EnginesBehindRouter, Routed, killed_soon
from quire_tools.engines.models import make_model
from quire_tools.engines.process import Answer, EngineProcess, engine_process
from quire_tools.engines.vllm import BLOCK, require_vllm
from quire_tools.local import LocalCluster

_TOKENS: Final = 2048
_SHARED: Final = 1792
_ANSWER: Final = 8
_KILL_AFTER_S: Final = 0.1
_LINK_BYTES_PER_S: Final = 100_000_000
_WIDTH: Final = 72
_STORED_S: Final = 30.0
_ROOM: Final = 4 * _TOKENS * 8192
"""Memory of an engine for its KV cache, bytes."""
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of an engine, for the time line. Seconds since the first step began."""

    who: str
    what: str
    begun_s: float
    took_s: float
    cached: int


class DemoVllm:
    """The whole demonstration, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: list[_Step] = []
        self._began_s = 0.0

    def run(self) -> None:
        """Run the demo. Raises `InvalidRequest` without vLLM, `SystemExit` when the tokens are wrong."""
        require_vllm()
        self._folder.mkdir(parents=True, exist_ok=True)
        os.environ["QUIRE_SHARED_MEMORY"] = OFF  # a delivery is to take a while, so that a node can be killed in it
        settings = {"QUIRE_SCHEDULER_LINKS": f"default={_LINK_BYTES_PER_S}", "QUIRE_SHARED_MEMORY": OFF}
        console.print(f"the link's budget is set to {_LINK_BYTES_PER_S / 1e6:.0f} MB/s, so that loads can be seen")
        with ExitStack() as stack:
            with console.status("a Llama of random weights; the cluster: redis, gateway, scheduler, 2 × storage, …"):
                model = make_model(self._folder / "model", layers=8, hidden=512, heads=8, kv_heads=2)
                cluster = stack.enter_context(
                    LocalCluster(self._folder / "cluster", storage_nodes=2, arena_bytes=256 << 20, settings=settings)
                )
            with console.status("three vLLM processes start: two with Quire, one without, to compare; some 30 s"):
                quire = cluster.gateway_address
                gateways = {"one": quire, "two": quire, "alone": ""}
                engines = [stack.enter_context(self._engine(name, model, where)) for name, where in gateways.items()]
                for engine in engines:
                    engine.ready()
            self._tell(cluster, *engines)
            self._tell_of_roles(model, quire, engines[-1])
            self._draw()

    def _engine(self, name: str, model: Path, gateway: str) -> AbstractContextManager[EngineProcess]:
        # Here it is to be seen, though computing might be quicker.
        extra = {"cut_off": False, "timeout_s": 5.0} if gateway else {}
        return engine_process(
            name,
            model,
            self._folder / f"engine-{name}.log",
            gateway=gateway,
            extra=extra,
            max_model_len=_TOKENS + 2 * BLOCK,
            kv_cache_memory_bytes=_ROOM,
        )

    def _tell(self, cluster: LocalCluster, storer: EngineProcess, reader: EngineProcess, alone: EngineProcess) -> None:
        draw = np.random.default_rng(int.from_bytes(os.urandom(4)))  # nothing of a run before is in the store
        first = draw.integers(2, 258, _TOKENS).tolist()
        second, third = ([*first[:_SHARED], *draw.integers(2, 258, _TOKENS - _SHARED).tolist()] for _ in range(2))
        self._began_s = time.monotonic()
        self._ask(storer, f"a prompt of {_TOKENS} tokens, computed", first)
        node = _fullest(cluster)
        reused, of_second = self._ask(reader, f"another one, its first {_SHARED} from Quire", second)
        computed, right_second = self._ask(alone, "the same, computed", second)
        with _killed_soon(cluster, node):
            hurt, of_third = self._ask(reader, f"a third one, {node} is killed meanwhile", third, fresh=True)
        _, right_third = self._ask(alone, "the same, computed", third, fresh=True)
        console.print(
            f"engine two had {reused.cached} of {_TOKENS} tokens from Quire: its first token came after "
            f"{reused.took_s * 1e3:.0f} ms; computing takes {computed.took_s * 1e3:.0f} ms"
        )
        console.print(f"with the node killed it took {hurt.took_s * 1e3:.0f} ms: what did not arrive was computed")
        _compare([of_second, of_third], [right_second, right_third])

    def _tell_of_roles(self, model: Path, gateway: str, alone: EngineProcess) -> None:
        draw = np.random.default_rng(int.from_bytes(os.urandom(4)))
        routed = EnginesBehindRouter(model, self._folder, gateway, _TOKENS + 2 * BLOCK, _ROOM)
        with ExitStack() as stack:
            with console.status("a prefill engine, a decode engine and a router start; some 30 s"):
                prefill = stack.enter_context(routed.running())
            warm_up, *prompts = (draw.integers(2, 258, _TOKENS).tolist() for _ in range(3))
            routed.ask(warm_up, 1)
            handed_over = self._route(routed, "one engine computes a prompt, another one decodes", prompts[0])
            with killed_soon(prefill):
                hurt = self._route(routed, "the next one; the prefill engine is killed meanwhile", prompts[1])
        right = [self._ask(alone, "the same, computed", prompt, fresh=True) for prompt in prompts]
        console.print(
            f"the decode engine had {handed_over.cached} of {_TOKENS} tokens from the prefill engine, through Quire: "
            f"its first token came after {handed_over.took_s * 1e3:.0f} ms; "
            f"computing takes {right[0][0].took_s * 1e3:.0f} ms"
        )
        console.print(f"with the prefill engine killed it took {hurt.took_s * 1e3:.0f} ms: the decode engine computed")
        _compare([handed_over.tokens, hurt.tokens], [tokens for _, tokens in right])

    def _route(self, routed: EnginesBehindRouter, purpose: str, prompt: Sequence[int]) -> Routed:
        begun_s = time.monotonic() - self._began_s
        with console.status(f"the router: {purpose}"):
            answer = routed.ask(prompt, _ANSWER)
        self._steps.append(_Step("router", purpose, begun_s, answer.took_s, answer.cached))
        return answer

    def _ask(
        self, engine: EngineProcess, purpose: str, prompt: Sequence[int], *, fresh: bool = False
    ) -> tuple[Answer, list[int]]:
        """Return the answer with the first token, and then more tokens."""
        begun_s = time.monotonic() - self._began_s
        with console.status(f"engine {engine.name} {purpose}"):
            first = engine.ask(prompt, fresh=fresh)
            tokens = engine.ask(prompt, _ANSWER).tokens
        self._steps.append(_Step(engine.name, purpose, begun_s, first.took_s, first.cached))
        return first, tokens

    def _draw(self) -> None:
        """Draw each request's time to its first token, cached and computed tokens, as bars of one scale."""
        table = Table("engine", "", "cached", "first token", "time")
        longest = max(step.took_s for step in self._steps)
        for step in self._steps:
            length = max(1, round(_WIDTH * step.took_s / longest))
            cached = round(length * step.cached / _TOKENS) if step.cached else 0
            bar = Text("━" * cached, style="green") + Text("━" * (length - cached), style="red")
            table.add_row(step.who, step.what, str(step.cached), f"{step.took_s * 1e3:.0f} ms", bar)
        Console(highlight=False, width=max(console.width, _WIDTH + 90)).print(table)
        console.print("[green]━[/] share of the prompt that was loaded or cached, [red]━[/] that was computed")


def _compare(tokens: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> None:
    """Say whether the tokens are those of vLLM alone. Raises `SystemExit` if they are not."""
    same = list(map(list, tokens)) == list(map(list, right))
    console.print(f"the same tokens with and without Quire: [bold]{'yes' if same else 'NO'}[/]")
    if not same:
        raise SystemExit("the tokens are wrong")


def _fullest(cluster: LocalCluster) -> str:
    """Return the storage node with the most chunks, once all of them are stored."""
    blocks, until_s = _TOKENS // BLOCK, time.monotonic() + _STORED_S
    with Client(cluster.gateway_address) as client:
        while True:
            chunks = {node.node_id: node.stats["chunks"] for node in client.status() if node.role is Role.STORAGE}
            if sum(chunks.values()) >= blocks:
                return max(chunks, key=lambda name: chunks[name])
            if time.monotonic() > until_s:
                raise InternalError(f"{sum(chunks.values())} of {blocks} blocks were stored")
            time.sleep(0.1)


@contextmanager
def _killed_soon(cluster: LocalCluster, name: str) -> Iterator[None]:
    timer = threading.Timer(_KILL_AFTER_S, lambda: os.kill(cluster.pid(name), signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.join()
