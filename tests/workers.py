"""Workers of pytest-xdist start clusters at the same moments: each has ports of its own.

A server of a Redis Cluster also listens 10,000 above its port: there is no worker's range.
"""

from __future__ import annotations

import os

_FIRST, _PORTS = 12_000, 10_000


def ports() -> str:
    """Those of this worker, as `QUIRE_LOCAL_PORTS` has them."""
    worker, workers = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    share = _PORTS // int(workers or 1)
    return f"{_FIRST + worker * share}-{_FIRST + (worker + 1) * share - 1}"
