"""The router in front of real vLLM servers, of which some die."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire_tools.engines.server import EngineServer, engine_server
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from quire_tools.router.prompts import Prompt
from quire_tools.router.server import Router, serving
from quire_tools.router.settings import RouterSettings, addresses
from tests.engines.engine import BLOCK, PROMPT, engine

LONG_S = 100.0


def _prompt(seed: int, length: int = 1000) -> list[int]:
    return [(at * seed) % 250 + 2 for at in range(length)]


@asynccontextmanager
async def _routed(gateway: str, **urls: Sequence[str]) -> AsyncIterator[tuple[Router, aiohttp.ClientSession]]:
    (port,) = free_ports(1)
    groups = [urls.get(name, ()) for name in ("engines", "prefill", "decode")]
    settings = RouterSettings(
        listen=f"127.0.0.1:{port}", engines=addresses(*groups), gateway=gateway, health_s=0.5, prefill_tokens_min=64
    )
    async with serving(settings) as router, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with asyncio.timeout(LONG_S):
            while not all(engine.is_up and engine.naming is not None for engine in router.engines):
                await asyncio.sleep(0.1)
        yield router, session


async def _tokens(session: aiohttp.ClientSession, prompt: Any, **more: Any) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    async with asyncio.timeout(LONG_S), session.post("/v1/completions", json=body) as answer:
        response = await answer.json()
        assert answer.status == 200, response
        tokens: list[int] = response["choices"][0]["token_ids"]
        return tokens


@pytest.fixture
def expected(tiny_model: Path) -> dict[int, list[int]]:
    """Tokens of vLLM alone, by the seed of the prompt."""
    seeds = [37, 11, 13, 17, 19]
    with engine(tiny_model) as alone:
        return dict(zip(seeds, (tokens for tokens, _ in alone.batch([_prompt(seed) for seed in seeds])), strict=True))


async def test_prefill_and_decode_engines_of_which_some_are_killed(
    tiny_model: Path, engine_cluster: LocalCluster, tmp_path: Path, expected: dict[int, list[int]]
) -> None:
    """The same tokens, whichever engine dies; a decode engine that dies costs no second prefill."""
    assert _prompt(37) == PROMPT
    gateway = engine_cluster.gateway_address
    with ExitStack() as stack:

        def start(name: str, role: str) -> EngineServer:
            return stack.enter_context(
                engine_server(tiny_model, tmp_path / name, gateway=gateway, role=role, handover_s=20.0)
            )

        prefill, *decode = start("prefill", "kv_producer"), start("one", "kv_consumer"), start("two", "kv_consumer")
        for server in (prefill, *decode):
            server.ready()
        urls = {"prefill": [prefill.url], "decode": [server.url for server in decode]}
        async with _routed(gateway, **urls) as (_, session):
            assert await _tokens(session, PROMPT) == expected[37]
            loaded = await _until_figures(decode, "loaded_blocks", (len(PROMPT) - 1) // BLOCK)
            answering = decode[0] if loaded[0] else decode[1]

            # The engine that would answer is frozen: it has the request, and its load is under way.
            answering.freeze()
            asking = asyncio.create_task(_tokens(session, _prompt(11)))
            other = decode[1] if answering is decode[0] else decode[0]
            await asyncio.sleep(0.5)
            answering.kill()
            assert await asking == expected[11]
            assert await _tokens(session, _prompt(13)) == expected[13]
            await _until_figures([other], "loaded_blocks", 2 * ((len(PROMPT) - 1) // BLOCK) - BLOCK)
            assert other.figure("short_handovers") == 0

            asking = asyncio.create_task(_tokens(session, _prompt(17)))
            prefill.kill()
            assert await asking == expected[17]
            assert await _tokens(session, _prompt(19)) == expected[19]


async def test_a_decode_engine_dies_after_half_of_its_layers(
    tiny_model: Path,
    engine_cluster: LocalCluster,
    tmp_path: Path,
    expected: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other decode engine loads the prompt: nothing is computed twice."""
    marker, site = tmp_path / "killed", Path(__file__).with_name("dying_site")
    monkeypatch.setenv("QUIRE_TEST_KILLED", str(marker))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")
    gateway = engine_cluster.gateway_address
    with ExitStack() as stack:
        prefill, *decode = (
            stack.enter_context(engine_server(tiny_model, tmp_path / name, gateway=gateway, role=role, handover_s=20.0))
            for name, role in (("prefill", "kv_producer"), ("one", "kv_consumer"), ("two", "kv_consumer"))
        )
        for server in (prefill, *decode):
            server.ready()
        urls = {"prefill": [prefill.url], "decode": [server.url for server in decode]}
        async with _routed(gateway, **urls) as (_, session):
            assert await _tokens(session, PROMPT) == expected[37]
            assert marker.exists()
            (alive,) = (server for server in decode if server.process.poll() is None)
            await _until_figures([alive], "loaded_blocks", (len(PROMPT) - 1) // BLOCK)
            assert alive.figure("short_handovers") == alive.figure("failed_blocks") == 0


async def _until_figures(servers: Sequence[EngineServer], name: str, least: float) -> list[float]:
    async with asyncio.timeout(LONG_S):
        while True:
            figures = [await asyncio.to_thread(server.figure, name) for server in servers]
            if sum(figures) >= least:
                return figures
            await asyncio.sleep(0.2)


async def test_engines_are_chosen_by_what_they_and_quire_have(
    tiny_model: Path, engine_cluster: LocalCluster, tmp_path: Path, expected: dict[int, list[int]]
) -> None:
    """The router knows an engine's blocks by its KV events, and computes the keys that the engine stores under."""
    gateway = engine_cluster.gateway_address
    ports = free_ports(2)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(engine_server(tiny_model, tmp_path / f"{port}", *_events_at(port), gateway=gateway))
            for port in ports
        ]
        for server in servers:
            server.ready()
        urls = [f"{server.url},events=tcp://127.0.0.1:{port}" for server, port in zip(servers, ports, strict=True)]
        async with _routed(gateway, engines=urls) as (router, session):
            assert await _tokens(session, PROMPT) == expected[37]
            whole = len(PROMPT) // BLOCK * BLOCK
            async with asyncio.timeout(LONG_S):
                while max(_cached(router)) < whole:
                    await asyncio.sleep(0.1)
            assert sorted(_cached(router)) == [0, whole]
            naming = router.engines[0].naming
            assert naming is not None and naming == router.engines[1].naming
            await _until_stored(gateway, naming, PROMPT)
            text = "".join(chr(token + 30) for token in _prompt(11, 200) if token < 90)
            tokens = await _tokens(session, text)  # by the engine's own tokenizer
            chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            async with session.post("/v1/chat/completions", json=chat) as answer:
                assert answer.status in (200, 400), "as the engine says: this model has no chat template"
            assert len(tokens) == 8


def _cached(router: Router) -> list[int]:
    prompt = Prompt(tokens=PROMPT, length=len(PROMPT))
    return [engine.blocks.cached_tokens(prompt.digests) for engine in router.engines if engine.blocks is not None]


def _events_at(port: int) -> list[str]:
    config = f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:{port}"}}'
    return ["--kv-events-config", config]


async def _until_stored(gateway: str, naming: Any, prompt: Sequence[int]) -> None:
    """The keys that the router computes are in Quire."""
    from quire.client import AsyncClient

    keys = naming.keys(prompt, "")
    async with AsyncClient(gateway) as client, asyncio.timeout(LONG_S):
        while (await client.lookup(naming.namespace, keys, lease_ttl_ms=0)).matched_chunks < len(keys):
            await asyncio.sleep(0.2)
