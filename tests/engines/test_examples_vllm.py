"""`examples/vllm_offline.py`, as the page of vLLM shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quire_tools.local import LocalCluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm_offline.py"


def test_the_second_run_has_its_prefix_from_the_first(tiny_model: Path, engine_cluster: LocalCluster) -> None:
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    cached = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), str(tiny_model), engine_cluster.gateway_address],
            capture_output=True,
            text=True,
            timeout=110,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = (line for line in done.stdout.splitlines() if "tokens cached" in line)
        cached.append(int(line.split()[0]))
    assert cached[0] == 0 and cached[1] >= 1024, cached
