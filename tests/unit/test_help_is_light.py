"""`quire --help` loads no library that only commands need, so that it answers at once."""

from __future__ import annotations

import subprocess
import sys

_HEAVY = ("numpy", "grpc", "redis", "torch", "asyncio", "opentelemetry", "psutil", "structlog", "google.protobuf")
_MODULES_MAX = 500
"""It loads some 380, most of them Python's, typer's and rich's own; 880 before commands imported theirs themselves."""


def test_it_loads_little() -> None:
    program = (
        "import sys; sys.argv = ['quire', '--help']\n"
        "from quire_tools.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), sep='\\n', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert "Usage" in done.stdout
    modules = set(done.stderr.split())
    assert not modules & {*_HEAVY}
    assert len(modules) < _MODULES_MAX, len(modules)
