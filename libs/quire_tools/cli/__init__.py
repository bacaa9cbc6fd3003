"""`quire`: the cluster from a terminal."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point: a `QuireError` is one line and status 1, no stack trace."""
    # gRPC reads it when it is loaded. Quire spawns processes and never forks, so gRPC need not guard against forks.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        from quire_tools.cli.app import run

        run()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0].startswith("quire"):
            raise
        sys.exit(f"quire: {error.name} is not installed; this needs the extra `tools` of Quire")
