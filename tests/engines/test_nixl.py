"""NIXL's plug-in for object stores against the S3 frontend: no code of ours is between them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from quire_tools.local import LocalCluster
from tests.engines.s3 import access

nixl = pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed here: `make test-engines` installs it")

BUCKET, NAMES = "states", ("first", "second")


def _transfer(agent: Any, operation: str, memory: list[np.ndarray[Any, Any]]) -> str:
    local = agent.get_xfer_descs([(each.ctypes.data, each.nbytes, 0) for each in memory], "DRAM")
    remote = agent.get_xfer_descs([(0, each.nbytes, at + 1) for at, each in enumerate(memory)], "OBJ")
    handle = agent.initialize_xfer(operation, local, remote, "quire", backends=["OBJ"])
    state, until_s = agent.transfer(handle), time.monotonic() + 20
    while state not in ("DONE", "ERR") and time.monotonic() < until_s:
        time.sleep(0.01)
        state = agent.check_xfer_state(handle)
    return str(state)


def test_objects_come_back_as_they_were_written(engine_cluster: LocalCluster) -> None:
    endpoint = f"http://{engine_cluster.s3_address}"
    key, secret = asyncio.run(access(engine_cluster, "nixl", BUCKET))
    agent = nixl.nixl_agent("quire", nixl.nixl_agent_config(backends=[]))
    settings = {"access_key": key, "secret_key": secret, "bucket": BUCKET, "region": "us-east-1", "scheme": "http"}
    agent.create_backend("OBJ", {**settings, "endpoint_override": endpoint, "use_virtual_addressing": "false"})
    draw = np.random.default_rng(0)
    stored = [draw.integers(0, 256, size, dtype=np.uint8) for size in (1 << 20, 300_000)]
    loaded = [np.zeros_like(each) for each in stored]
    for each in (*stored, *loaded):
        agent.register_memory([(each.ctypes.data, each.nbytes, 0, "")], "DRAM", backends=["OBJ"])
    objects = [(0, each.nbytes, at + 1, NAMES[at]) for at, each in enumerate(stored)]
    agent.register_memory(objects, "OBJ", backends=["OBJ"])
    assert _transfer(agent, "WRITE", stored) == "DONE"
    assert _transfer(agent, "READ", loaded) == "DONE"
    assert all(np.array_equal(*pair) for pair in zip(stored, loaded, strict=True))
