"""Workers of pytest-xdist start clusters at the same moments: each has ports of its own."""

from __future__ import annotations

import os

_FIRST, _PORTS = 12_000, 20_000


def ports() -> str:
    """Those of this worker, as `QUIRE_LOCAL_PORTS` has them."""
    worker, workers = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    share = _PORTS // int(workers or 1)
    return f"{_FIRST + worker * share}-{_FIRST + (worker + 1) * share - 1}"
