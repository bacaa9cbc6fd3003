"""The cost of the router: answers through it, against the same engines asked directly.

The engines answer at once, so that everything that is measured is the way. They are processes of their own, as is the
router; with Quire's gateway each prompt's blocks are named, and the orchestrator chooses.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import numpy as np
import typer
import uvloop
from aiohttp import web

from quire.model.errors import InternalError, InvalidRequest
from quire.model.hashing import Namespace
from quire.transport import OFF
from quire_bench.filling import llama_layout
from quire_tools.cli.options import Json, Plot
from quire_tools.local import LocalCluster
from quire_tools.local.ports import free_ports
from quire_tools.report import Report, Row, percentile

_MODEL: Final = "model"
_WARM: Final = 20
_BLOCK_TOKENS: Final = 16
_LOOK_S: Final = 0.1
_EVENT: Final = b'data: {"choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'


def serve(port: int) -> None:
    """Run an engine that answers at once."""
    namespace = Namespace(_MODEL, "bench", llama_layout(1, _BLOCK_TOKENS)).to_record()
    blocks = {"namespace": namespace, "hash_tokens": _BLOCK_TOKENS, "parent": "00" * 32}
    description = {"quire_names": "bench", "quire_blocks": blocks}

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": _MODEL}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": " token"}], "kv_transfer_params": description})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(_EVENT)
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def _router(urls: Sequence[str], gateway: str, log: Path) -> Iterator[str]:
    """Run a router, and return its URL."""
    (port,) = free_ports(1)
    command = [sys.executable, "-c", "from quire_tools.cli import main; main()", "router"]
    command += [part for url in urls for part in ("--engine", url)]
    command += ["--listen", f"127.0.0.1:{port}", *(["--gateway", gateway] if gateway else [])]
    with _running(command, log) as process:
        yield asyncio.run(_ready(f"http://127.0.0.1:{port}", process, log))


async def _ready(url: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until a server answers. Raises `InternalError` if it ends."""
    path = "/readyz" if "router" in process.args else "/health"  # type: ignore[operator]
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(url + path) as answer:
                    if answer.status == 200:
                        await asyncio.sleep(1.0)  # all engines are up
                        return url
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(_LOOK_S)
    raise InternalError(f"a process ended with {process.returncode}; its output is in {log}")


async def _answers(url: str, prompt: Sequence[int], rounds: int) -> list[float]:
    """Return the seconds of whole answers, one caller."""
    times, question = [], {"model": _MODEL, "prompt": list(prompt), "max_tokens": 1}
    async with aiohttp.ClientSession() as session:
        for number in range(rounds + _WARM):
            began_s = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=question) as answer:
                await answer.read()
            if answer.status != 200:
                raise InternalError(f"{url} answers {answer.status}")
            if number >= _WARM:
                times.append(time.perf_counter() - began_s)
    return times


async def _tokens_per_s(urls: Sequence[str], streams: int, tokens: int) -> float:
    """Return the sum of the rates of all streams; the servers receive them in turns."""
    question: dict[str, Any] = {"model": _MODEL, "prompt": [1] * 32, "max_tokens": tokens, "stream": True}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def receive(url: str) -> int:
            async with session.post(f"{url}/v1/completions", json=question) as answer:
                return (await answer.read()).count(b"token")

        began_s = time.perf_counter()
        received = sum(await asyncio.gather(*(receive(urls[at % len(urls)]) for at in range(streams))))
        took_s = time.perf_counter() - began_s
    if received != streams * tokens:
        raise InternalError(f"{received} of {streams * tokens} tokens came")
    return received / took_s


def run(prompt_tokens: int, rounds: int, streams: int, tokens: int) -> Report:
    """Measure."""
    report = Report("router", {"name": "the same engines asked directly, same run", "unit": "ms, tokens/s"}, tall=True)
    prompt = np.random.default_rng(5).integers(2, 30_000, prompt_tokens).tolist()
    settings = {"QUIRE_STORAGE_DRIVES": "", "QUIRE_STORAGE_OBJECT_URL": "", "QUIRE_SHARED_MEMORY": OFF}
    with tempfile.TemporaryDirectory(prefix="quire-router-") as name, ExitStack() as stack:
        folder, ports = Path(name), free_ports(2)
        cluster = stack.enter_context(LocalCluster(folder / "cluster", arena_bytes=1 << 26, settings=settings))
        for port in ports:
            command = [sys.executable, "-m", __name__, str(port)]
            process = stack.enter_context(_running(command, folder / f"engine-{port}"))
            asyncio.run(_ready(f"http://127.0.0.1:{port}", process, folder / f"engine-{port}"))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        ways = {
            "by queues": stack.enter_context(_router(urls, "", folder / "queues")),
            "by Assign": stack.enter_context(_router(urls, cluster.gateway_address, folder / "assign")),
        }
        direct = asyncio.run(_answers(urls[0], prompt, rounds))
        rate = asyncio.run(_tokens_per_s(urls, streams, tokens))
        base = percentile(direct, 0.5)
        for way, url in ways.items():
            times = asyncio.run(_answers(url, prompt, rounds))
            measured = {"p50 ms": percentile(times, 0.5) * 1e3, "p99 ms": percentile(times, 0.99) * 1e3}
            row = Row({"what": f"answer, {way}"}, measured, base * 1e3, percentile(times, 0.5) / base)
            report.rows.append(row)
        for way, url in ways.items():
            routed = asyncio.run(_tokens_per_s([url], streams, tokens))
            row = Row({"what": f"{streams} streams, {way}"}, {"tokens/s": routed}, rate, routed / rate)
            report.rows.append(row)
    report.notes.append(
        f"prompts of {prompt_tokens} tokens, one caller, {rounds} rounds; streams of {tokens} tokens; engines that "
        "answer at once, on the cores that client and router have, too"
    )
    return report


def command(
    prompt_tokens: Annotated[int, typer.Option(help="of each prompt")] = 2048,
    rounds: Annotated[int, typer.Option(help="answers that are measured")] = 300,
    streams: Annotated[int, typer.Option(help="at the same time")] = 32,
    tokens: Annotated[int, typer.Option(help="of each stream")] = 2000,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Answers and streams through the router, against the engines asked directly."""
    if min(prompt_tokens, rounds, streams, tokens) < 1:
        raise InvalidRequest("a number is not positive", field="prompt_tokens, …, tokens")
    run(prompt_tokens, rounds, streams, tokens).show(json_file, plot)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
