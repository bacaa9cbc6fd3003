"""`quire doctor`: what of this machine keeps Quire from working, from being safe, or from being fast."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from quire import __version__
from quire.model.errors import QuireError

_FILES_MIN: Final = 4096
_MEMORY_MIN: Final = 1 << 30
_ON_DEMAND: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SKEW_S: Final = 1.0
_ROUND_TRIP_S: Final = 0.005
_NON_TEMPORAL: Final = "glibc.cpu.x86_non_temporal_threshold"
console = Console()


class Severity(Enum):
    """How a finding bears on Quire; the values are printed."""

    GOOD = "ok"
    SLOWER = "slower"
    UNSAFE = "unsafe"
    BROKEN = "broken"


class Finding(NamedTuple):
    """`found`: the state; `advice`: the remedy, empty if it is good."""

    level: Severity
    what: str
    found: str
    advice: str = ""


def doctor(drives: Sequence[Path], redis_url: str, *, as_json: bool) -> bool:
    """Run the checks and print the findings; return whether nothing is broken."""
    findings = list(look(drives, redis_url))
    if as_json:
        print(json.dumps([{**finding._asdict(), "level": finding.level.value} for finding in findings], indent=2))
    else:
        table = Table("", "what", box=None, header_style="dim", pad_edge=False)
        table.add_column("found", overflow="fold")
        styles = {
            Severity.GOOD: "green",
            Severity.SLOWER: "yellow",
            Severity.UNSAFE: "magenta",
            Severity.BROKEN: "bold red",
        }
        for finding in findings:
            table.add_row(f"[{styles[finding.level]}]{finding.level.value}[/]", finding.what, finding.found)
            if finding.advice:
                table.add_row("", "", f"[dim]→ {finding.advice}[/]")
        console.print(table)
    return all(finding.level is not Severity.BROKEN for finding in findings)


def look(drives: Sequence[Path], redis_url: str) -> Iterator[Finding]:
    """Check in the order of a request's way: network, memory, drives, Redis."""
    checks: list[Callable[[], Iterator[Finding]]] = [_machine, _ucx, _rdma, _memory, _copies, _ring]
    for check in checks:
        yield from check()
    for folder in drives:
        yield from _drive(folder)
    if redis_url:
        yield from asyncio.run(_redis(redis_url))


def _machine() -> Iterator[Finding]:
    cpus = len(os.sched_getaffinity(0))
    versions = f"Quire {__version__}, Python {platform.python_version()}, Linux {platform.release()}, {cpus} processors"
    yield Finding(Severity.GOOD, "machine", versions)
    files, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = files != resource.RLIM_INFINITY and files < _FILES_MIN
    advice = f"ulimit -n {_FILES_MIN} (at most {limit}): each client and each peer takes some" if low else ""
    yield Finding(Severity.SLOWER if low else Severity.GOOD, "open files", f"{files} allowed", advice)


def _ucx() -> Iterator[Finding]:
    try:
        from pyucx import library
        from pyucx.selftest import gathers_correctly
        from quire.transport.ucx import reached_versions
    except ImportError as error:
        yield Finding(Severity.BROKEN, "UCX", str(error), "pip install libucx-cu12, or the system's UCX (libucx0)")
        return
    version = f"{'.'.join(map(str, library.version))} from {library.path} ({library.origin})"
    reached = ", ".join(reached_versions())
    yield Finding(Severity.GOOD, "UCX", f"{version}; reaches {reached} at the other end of a transfer")
    modules = {
        file.name.split(".")[0].removeprefix("libuct_") for file in (library.path.parent / "ucx").glob("libuct_*")
    }
    carries = ", ".join(["tcp", "shared memory", *sorted(modules)])
    only = f"; UCX_TLS allows {named}" if (named := os.environ.get("UCX_TLS")) else ""
    yield Finding(Severity.GOOD, "transports", f"{carries}{only}")
    if asyncio.run(gathers_correctly()):
        yield Finding(Severity.GOOD, "UCX gathers", "many slices in one put arrive as they should")
    else:
        advice = "a newer UCX: slices are put one by one meanwhile"
        yield Finding(Severity.SLOWER, "UCX gathers", "not correctly: the self-test's bytes were wrong", advice)


def _rdma() -> Iterator[Finding]:
    folder = Path("/sys/class/infiniband")
    devices = sorted(device.name for device in folder.iterdir()) if folder.is_dir() else []
    if not devices:
        yield Finding(Severity.SLOWER, "RDMA", "no device", "between hosts bytes go over TCP, with copies")
        return
    from pyucx import library
    from pyucx._library import has_rdma

    if has_rdma(library.path):
        yield Finding(Severity.GOOD, "RDMA", ", ".join(devices))
    else:
        advice = (
            "install UCX 1.15 or newer with its InfiniBand transports (Debian 13: libucx0); for NVIDIA's cards "
            "`pip install nixl-cu12` does, too"
        )
        yield Finding(Severity.SLOWER, "RDMA", f"{', '.join(devices)}, which this UCX does not use", advice)


def _memory() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < _MEMORY_MIN and os.geteuid() != 0:
        advice = "RDMA pins the whole arena: ulimit -l unlimited, or LimitMEMLOCK=infinity of the service"
        yield Finding(Severity.SLOWER, "pinned memory", f"{soft >> 10} KiB allowed", advice)
    else:
        yield Finding(Severity.GOOD, "pinned memory", "enough allowed")
    sizes = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    yield huge_pages(int(sizes.get("HugePages_Free", "0")), _ON_DEMAND.read_text() if _ON_DEMAND.exists() else "")


def huge_pages(reserved: int, on_demand: str) -> Finding:
    """`on_demand`: what Linux says of transparent huge pages, as `always [madvise] never`; empty without them."""
    if on_demand and "[never]" not in on_demand:
        return Finding(Severity.GOOD, "huge pages", f"on demand, {reserved} reserved")
    advice = (
        f"echo madvise > {_ON_DEMAND}, or sysctl vm.nr_hugepages and QUIRE_STORAGE_HUGE_PAGES=true at storage nodes"
    )
    state = f"{reserved} reserved, none on demand"
    return Finding(Severity.GOOD if reserved else Severity.SLOWER, "huge pages", state, "" if reserved else advice)


def _copies() -> Iterator[Finding]:
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return
    tuned = _NON_TEMPORAL in os.environ.get("GLIBC_TUNABLES", "")
    advice = "" if tuned else f"GLIBC_TUNABLES={_NON_TEMPORAL}=0x40000 for storage (images and `quire up` set it)"
    state = "large copies pass the cache by" if tuned else "large copies go through the cache"
    yield Finding(Severity.GOOD if tuned else Severity.SLOWER, "memcpy", state, advice)


def _ring() -> Iterator[Finding]:
    from quire_storage.adapters.uring import UringBlockIO
    from quire_storage.errors import BlockIOUnavailable

    ring = UringBlockIO(1, direct=False)
    try:
        ring.init_queue([0], [])
        yield Finding(Severity.GOOD, "io_uring", "works")
    except BlockIOUnavailable as error:
        advice = "drives are read with threads; in a container allow it: docs/operations/kubernetes.md"
        yield Finding(Severity.SLOWER, "io_uring", str(error), advice)
    finally:
        ring.close()


def _drive(folder: Path) -> Iterator[Finding]:
    subject = f"drive {folder}"
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            free = os.statvfs(folder)
            room = f"{free.f_bavail * free.f_frsize >> 30} GiB free"
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            direct = _reads_directly(file.name)
    except OSError as error:
        yield Finding(Severity.BROKEN, subject, f"{error.strerror or error}", "a folder that this user can write to")
        return
    advice = "" if direct else "O_DIRECT does not work on this file system: bytes go through the page cache"
    yield Finding(Severity.GOOD if direct else Severity.SLOWER, subject, room, advice)


def _reads_directly(name: str) -> bool:
    try:
        file = os.open(name, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.preadv(file, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _skew_s(before_s: float, there_s: float, after_s: float) -> float:
    """How far a clock is off at least that was read between two looks at ours."""
    return max(0.0, before_s - there_s, there_s - after_s)


async def _redis(url: str) -> list[Finding]:
    from quire_server.redis import connect
    from quire_server.redis.capacity import fullness, warnings
    from quire_server.redis.connection import is_cluster, metadata_errors

    client: Any = connect(url)
    findings = []
    try:
        async with metadata_errors():
            await client.ping()
            began_s = time.perf_counter()
            await client.ping()
            round_trip_s = time.perf_counter() - began_s
            before_s = time.time()
            seconds, micros = (await client.time()) if not is_cluster(client) else (before_s, 0)
            after_s = time.time()
            info = await client.info() if not is_cluster(client) else {}
    except QuireError as error:
        return [Finding(Severity.BROKEN, "Redis", str(error), "is it up, and is QUIRE_REDIS_URL right?")]
    finally:
        await client.aclose()
    slow = round_trip_s > _ROUND_TRIP_S
    version = info.get("redis_version", "Cluster")
    advice = "each look-up takes one round trip: put it nearer" if slow else ""
    findings.append(
        Finding(
            Severity.SLOWER if slow else Severity.GOOD, "Redis", f"{version}, {round_trip_s * 1e3:.2f} ms away", advice
        )
    )
    findings += [
        Finding(Severity.UNSAFE, "Redis", problem, "see docs/operations/redis.md") for problem in warnings(info)
    ]
    if fullness(info) > 0.8:
        findings.append(Finding(Severity.UNSAFE, "Redis", f"{fullness(info):.0%} of maxmemory is used", "more memory"))
    skew_s = _skew_s(before_s, float(seconds) + float(micros) / 1e6, after_s)
    off = skew_s > _SKEW_S
    advice = "leases and permits expire by the clock: run chrony or another NTP client" if off else ""
    findings.append(Finding(Severity.UNSAFE if off else Severity.GOOD, "clock", f"{skew_s:.2f} s from Redis'", advice))
    return findings
