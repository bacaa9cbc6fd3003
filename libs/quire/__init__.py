"""Quire: intermediate state of generative inference, kept as small immutable objects."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("quire")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

PROTOCOL_VERSION = 4
"""What this release speaks. Goes up when a message changes its meaning."""

PROTOCOL_OLDEST = 3
"""The oldest that it understands: from there on all may be used together, as while a cluster is upgraded."""
