"""Tests over RDMA verbs, in a virtual machine with soft-RoCE: `make test-rdma`."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
