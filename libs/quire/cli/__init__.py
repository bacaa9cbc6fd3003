"""`quire`: the cluster from a terminal."""

from quire.cli.app import main

__all__ = ["main"]
