"""The README's table of variables is that of the code, and says so when it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "quire_orchestrator": "OrchestratorConfig",
    "quire_gateway": "GatewayConfig",
    "quire_storage": "StorageConfig",
    "quire_scheduler": "SchedulerConfig",
    "quire_decoder": "DecoderConfig",
}


def test_every_variable_is_in_the_readme_and_no_other() -> None:
    """As `make check` asks it."""
    command = [sys.executable, "tools/settings.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
