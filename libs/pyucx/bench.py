"""`python -m pyucx.bench`: put, get, stream and latency between two processes, compared with the same stream in C.

The C program (tests/benchmarks/ucx_stream.c of the repository) is built with gcc against the headers of the library in
use; where either is missing the column stays empty. `ucx_perftest` is run where found: its put reuses one buffer,
which flatters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyucx import Context, Endpoint, Memory, RemoteMemory, Worker, library

_LAYER, _GO = 1, 2
_LAYERS = 32
_C_SOURCE = Path("tests/benchmarks/ucx_stream.c")


@dataclass(frozen=True, slots=True)
class SizeResult:
    """Medians for one size: GB/s (10^9 bytes) by verb, latency of one layer and its message in µs."""

    transport: str
    size: int
    put_gb_s: float
    get_gb_s: float
    stream_gb_s: float
    stream_spread: float
    latency_us: float
    c_stream_gb_s: float | None

    @property
    def ratio(self) -> float | None:
        return self.stream_gb_s / self.c_stream_gb_s if self.c_stream_gb_s else None


@dataclass(frozen=True, slots=True)
class Link:
    """A side of the pair, connected, with `memory` here and `remote` at the other side, of the same size."""

    worker: Worker
    endpoint: Endpoint
    memory: Memory
    remote: RemoteMemory


async def _connect(
    context: Context, worker: Worker, length: int, write: Callable[[str], None], read: Callable[[], Awaitable[str]]
) -> Link:
    buffer = np.ones(length, dtype=np.uint8)
    memory = context.register(buffer)
    write(json.dumps([worker.address().hex(), memory.address, memory.remote_key.hex()]))
    address, remote_address, key = json.loads(await read())
    endpoint = worker.connect(bytes.fromhex(address))
    return Link(worker, endpoint, memory, endpoint.remote_memory(remote_address, length, bytes.fromhex(key)))


async def _peer(transport: str, size: int) -> None:
    """Run the other process: it streams its layers into the parent's memory at each request."""
    loop = asyncio.get_running_loop()

    async def read() -> str:
        return await loop.run_in_executor(None, sys.stdin.readline)

    requests: asyncio.Queue[bytes] = asyncio.Queue()
    context = Context(TLS=transport)
    async with Worker(context) as worker:
        worker.on_message(_GO, requests.put_nowait)
        link = await _connect(context, worker, size * _LAYERS, lambda line: print(line, flush=True), read)
        while link.endpoint.error is None:
            with worker.expecting():
                (layers,) = struct.unpack("<I", await requests.get())
            stream = link.endpoint.stream(link.memory, link.remote, _LAYER)
            for layer in range(layers):
                await stream.send(layer * size, size, layer * size)
                stream.announce(struct.pack("<I", layer))
            await stream.drain()


async def _timed(rounds: int, action: Callable[[], Awaitable[None]]) -> list[float]:
    for _ in range(2):
        await action()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        await action()
        seconds.append(time.perf_counter() - start)
    return seconds


async def _measure(link: Link, arrivals: asyncio.Queue[bytes], size: int, rounds: int) -> dict[str, list[float]]:
    async def put() -> None:
        await link.endpoint.put(link.memory, 0, size, link.remote, 0)
        await link.endpoint.flush()

    async def get() -> None:
        await link.endpoint.get(link.memory, 0, size, link.remote, 0)

    async def stream(layers: int = _LAYERS) -> None:
        link.endpoint.send(_GO, struct.pack("<I", layers))
        for _ in range(layers):
            async with asyncio.timeout(60):
                await arrivals.get()

    with link.worker.expecting():
        return {
            "stream": await _timed(rounds, stream),
            "latency": await _timed(rounds * 4, lambda: stream(1)),
            "put": await _timed(rounds * 4, put),
            "get": await _timed(rounds * 4, get),
        }


async def measure(transport: str, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by verb, against a fresh process."""
    command = [sys.executable, "-m", "pyucx.bench", "--peer", transport, str(size)]
    peer = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert peer.stdin is not None
    assert peer.stdout is not None
    stdin, stdout = peer.stdin, peer.stdout

    async def read() -> str:
        async with asyncio.timeout(60):
            return (await stdout.readline()).decode()

    arrivals: asyncio.Queue[bytes] = asyncio.Queue()
    try:
        context = Context(TLS=transport)
        async with Worker(context) as worker:
            worker.on_message(_LAYER, arrivals.put_nowait)
            link = await _connect(
                context, worker, size * _LAYERS, lambda line: stdin.write(line.encode() + b"\n"), read
            )
            return await _measure(link, arrivals, size, rounds)
    finally:
        if peer.returncode is None:
            peer.kill()
        await peer.wait()


def build_c_program(folder: Path) -> Path | None:
    """Compile the C pattern against the library in use; None where source, gcc or headers are missing."""
    gcc, include = shutil.which("gcc"), header_folder()
    if gcc is None or include is None or not _C_SOURCE.exists():
        return None
    program, lib = folder / "ucx_stream", library.path.parent
    command = [
        gcc,
        "-O2",
        "-w",
        "-I",
        str(include),
        str(_C_SOURCE),
        "-o",
        str(program),
        str(library.path),
        str(lib / "libucs.so.0"),
        f"-Wl,-rpath,{lib}",
        f"-Wl,-rpath-link,{lib}",
    ]
    built = subprocess.run(command, capture_output=True, check=False, timeout=120)
    return program if built.returncode == 0 else None


def header_folder() -> Path | None:
    """Return the folder of the headers of the library in use."""
    places = [library.path.parent.parent / "include", library.path.parent.parent.parent / "include"]
    return next((place for place in places if (place / "ucp/api/ucp.h").exists()), None)


def run_c_program(program: Path, transport: str, size: int, rounds: int) -> list[float] | None:
    """Seconds of each round of the C program."""
    command = [str(program), str(size), str(_LAYERS), str(rounds)]
    environment = {**os.environ, "UCX_TLS": transport}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    return [float(line) for line in done.stdout.split()] if done.returncode == 0 else None


def perftest(size: int) -> str | None:
    """Return a line of `ucx_perftest`'s put bandwidth, for orientation."""
    if shutil.which("ucx_perftest") is None:
        return None
    server = subprocess.Popen(["ucx_perftest"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        command = ["ucx_perftest", "-t", "ucp_put_bw", "-s", str(size), "-n", "2000", "127.0.0.1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return next((line for line in done.stdout.splitlines() if line.startswith("Final")), None)
    finally:
        server.kill()
        server.wait()


def bench_row(transport: str, size: int, rounds: int, program: Path | None) -> SizeResult:
    """Python and C in turn, twice, so that a drift of the machine meets both."""
    halves = [rounds - rounds // 2, rounds // 2 or 1]
    seconds: dict[str, list[float]] = {}
    c_seconds: list[float] = []
    for half in halves:
        for verb, values in asyncio.run(measure(transport, size, half)).items():
            seconds.setdefault(verb, []).extend(values)
        c_seconds += (run_c_program(program, transport, size, half) or []) if program else []
    stream = sorted(size * _LAYERS / value / 1e9 for value in seconds["stream"])
    return SizeResult(
        transport=transport,
        size=size,
        put_gb_s=size / statistics.median(seconds["put"]) / 1e9,
        get_gb_s=size / statistics.median(seconds["get"]) / 1e9,
        stream_gb_s=statistics.median(stream),
        stream_spread=(stream[-1] - stream[0]) / statistics.median(stream),
        latency_us=statistics.median(seconds["latency"]) * 1e6,
        c_stream_gb_s=size * _LAYERS / statistics.median(c_seconds) / 1e9 if c_seconds else None,
    )


def _size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1].upper() in units else int(text)


def main(arguments: list[str] | None = None) -> None:
    if arguments is None and sys.argv[1:2] == ["--peer"]:
        asyncio.run(_peer(sys.argv[2], int(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(prog="python -m pyucx.bench", description=__doc__)
    parser.add_argument("--transports", default="cma,tcp", help="each measured alone (cma rides with tcp)")
    parser.add_argument("--sizes", default="256K,1M,4M,16M")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    major, minor, release = library.version
    print(f"UCX {major}.{minor}.{release} from {library.path} ({library.origin}); {_LAYERS} layers per stream")
    heading = (
        f"{'transport':10}{'size':>10}{'put':>8}{'get':>8}{'stream':>8}{'±':>6}{'latency':>10}{'C':>8}{'ratio':>7}"
    )
    print(heading + "      GB/s, µs")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        program = build_c_program(Path(folder))
        for transport in options.transports.split(","):
            tls = "tcp,cma" if transport == "cma" else transport
            for size in map(_size, options.sizes.split(",")):
                row = bench_row(tls, size, options.rounds, program)
                print(
                    f"{transport:10}{size:>10}{row.put_gb_s:>8.2f}{row.get_gb_s:>8.2f}{row.stream_gb_s:>8.2f}"
                    f"{row.stream_spread:>6.0%}{row.latency_us:>10.0f}{row.c_stream_gb_s or 0:>8.2f}"
                    f"{row.ratio or 0:>7.2f}",
                    flush=True,
                )
                rows.append(
                    {
                        "params": {"transport": transport, "size": size},
                        "measured": asdict(row),
                        "baseline": row.c_stream_gb_s,
                        "ratio": row.ratio,
                    }
                )
    if line := perftest(1 << 20):
        print(f"ucx_perftest put, 1 MiB: {line}")
    if options.json:
        baseline = {"name": "the same stream in C, busy polling", "unit": "GB/s"}
        report = {
            "bench": "pyucx",
            "version": f"{major}.{minor}.{release}",
            "machine": os.uname().machine,
            "baseline": baseline,
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
