"""The unit for bare machines: systemd understands it, and it starts what there is."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "examples" / "systemd" / "quire@.service"


def _unit() -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    return unit


def test_it_starts_every_service() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    services = {name.removeprefix("quire-") for name in scripts} - {"quire"}
    assert services == {"orchestrator", "gateway", "storage", "scheduler", "decoder"}
    assert _unit()["Service"]["ExecStart"] == "/opt/quire/bin/quire-%i"
    assert _unit()["Service"]["ExecStartPre"] == "/opt/quire/bin/quire-%i --check"


def test_systemd_understands_it(tmp_path: Path) -> None:
    """With a program in the place of Quire's, which is not at /opt here."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not here")
    unit = tmp_path / "quire@storage.service"
    unit.write_text(UNIT.read_text().replace("/opt/quire/bin/quire-%i", "/bin/true").replace("=quire\n", "=daemon\n"))
    done = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, timeout=60)
    if "Failed to initialize" in done.stderr or "Failed to connect" in done.stderr:
        pytest.skip(f"systemd does not run here: {done.stderr}")
    about_it = [line for line in done.stderr.splitlines() if "quire" in line]
    assert done.returncode == 0 and about_it == [], done.stderr
    unit.write_text(unit.read_text().replace("LimitNOFILE=65536", "LimitNOFILE=many"))
    assert (
        "Failed to parse resource value"
        in subprocess.run([program, "verify", str(unit)], capture_output=True, text=True).stderr
    )
