"""Quire: intermediate state of generative inference, kept as small immutable objects."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("quire")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

PROTOCOL_VERSION = 1
"""What nodes must agree on to be used together."""
