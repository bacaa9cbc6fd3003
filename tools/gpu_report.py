"""Everything that a machine with a GPU can show, in one command, as Markdown and JSON.

python tools/gpu_report.py [--device cuda] [--out build/gpu]

Contract suites and orders of copies, then `quire bench gpu`: delivery into device memory against the bare copy, overlap
of layers with compute, logits bit by bit, decoding. Status 1 if a test or a check failed; the report is written anyway.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
TESTS: Final = (
    "tests/contract/test_devices.py",
    "tests/contract/test_block_io.py",
    "tests/unit/decoder/test_engines.py",
    "tests/unit/decoder/test_built_engines.py",
    "tests/unit/decoder/test_device.py",
    "tests/unit/quire/test_sglang_order.py",
    "tests/unit/quire/test_vllm_order.py",
)
"""Contract suites, and orders of copies: those of engines by a fake device, those of CUDA on the GPU."""
_PUBLISHED_MS: Final = 32.6
"""LatentBox: decode of a picture of 1024 x 1024."""
_COMMAND: Final = "import sys; from quire_tools.cli import main; sys.exit(main())"


def main(device: str, out: Path) -> int:
    """Test, measure, and write the report. Return the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    tests = _test(out)
    measured = out / "bench.json"
    command = [sys.executable, "-c", _COMMAND, "bench", "gpu", "--device", device, "--json", str(measured)]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    bench = json.loads(measured.read_text()) if status == 0 else None
    report = {"device": _device(), "tests": tests, "bench": bench, "bench_status": status}
    (out / "report.json").write_text(json.dumps(report, indent=2))
    (out / "report.md").write_text(_markdown(report))
    print(f"{out / 'report.md'}, {out / 'report.json'}")
    return 0 if status == 0 and not tests["failed"] and tests["passed"] else 1


def _test(out: Path) -> dict[str, Any]:
    results = out / "tests.xml"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={results}", *TESTS]
    subprocess.run(command, cwd=ROOT, check=False)
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "reasons": []}
    if not results.exists():
        return counts | {"failed": 1, "reasons": ["the tests did not run"]}
    for case in xml.parse(results).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
        skipped = case.find("skipped")
        if kind == "failed":
            counts["reasons"].append(f"failed: {case.get('classname')}::{case.get('name')}")
        elif skipped is not None:
            counts["reasons"].append(f"skipped: {case.get('name')}: {skipped.get('message')}")
    return counts


def _device() -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"name": name, "torch": torch.__version__, "cuda": str(torch.version.cuda), "python": sys.version.split()[0]}


def _markdown(report: Mapping[str, Any]) -> str:
    device, tests, bench = report["device"], report["tests"], report["bench"]
    lines = [
        f"# {device['name']}",
        "",
        f"torch {device['torch']}, CUDA {device['cuda']}, Python {device['python']}",
        "",
        f"Tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped",
        "",
        *(f"- {reason}" for reason in dict.fromkeys(tests["reasons"])),
    ]
    if bench is None:
        return "\n".join([*lines, "", f"`quire bench gpu` ended with status {report['bench_status']}.", ""])
    for _, rows in groupby(bench["rows"], key=lambda row: (row["params"]["part"].split()[0], tuple(row["measured"]))):
        lines += ["", *_table(list(rows), bench["baseline"]["unit"])]
    lines += ["", f"Baseline: {bench['baseline']['name']}", "", *(f"- {note}" for note in bench["notes"])]
    decodes = [row for row in bench["rows"] if row["params"]["part"] == "decode 1024"]
    if decodes and device["name"] != "no GPU":
        best = min(decodes, key=lambda row: row["measured"]["ms"])
        ratio = best["measured"]["ms"] / _PUBLISHED_MS
        lines.append(
            f"- decode of 1024 × 1024: {best['measured']['ms']:.1f} ms by {best['params']['way']}, {ratio:.2f} of "
            f"LatentBox's published {_PUBLISHED_MS} ms (another GPU)"
        )
    return "\n".join([*lines, ""])


def _table(rows: Sequence[Mapping[str, Any]], unit: str) -> list[str]:
    names = [*rows[0]["params"], *rows[0]["measured"], f"baseline, {unit}", "ratio"]
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---' for _ in names)} |"]
    for row in rows:
        figures = ["–" if value is None else f"{value:.4g}" for value in row["measured"].values()]
        cells = [*map(str, row["params"].values()), *figures, f"{row['baseline']:.4g}", f"{row['ratio']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="test and measure on a GPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    arguments = parser.parse_args()
    sys.exit(main(arguments.device, arguments.out.resolve()))
