"""The orchestrator's gRPC frontend, where it decides by what a member of the release before does not say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.model.index import OBJECT_TIER
from quire.wire.v1 import orchestrator_pb2
from quire_orchestrator.server import OrchestratorServicer


@pytest.mark.parametrize(
    ("request_", "withdrawn"),
    [
        (orchestrator_pb2.WithdrawRequest(node_id=OBJECT_TIER), [0, 0]),
        (orchestrator_pb2.WithdrawRequest(node_id=OBJECT_TIER, all_generations=True), [1, 1]),
        (orchestrator_pb2.WithdrawRequest(node_id="a"), [1, 1]),
        (orchestrator_pb2.WithdrawRequest(node_id="a", others_min=1), [0, 0]),
        (orchestrator_pb2.WithdrawRequest(node_id="a", others_min=1, keepers=["b"]), [1, 1]),
    ],
)
async def test_what_a_node_of_the_release_before_cannot_know_it_does_not_withdraw(
    request_: orchestrator_pb2.WithdrawRequest, withdrawn: list[int]
) -> None:
    """It looks for an object under the name of before only, and names no keepers of the copy that it gives up."""

    async def withdraw(node_id: str, chunks: Any, *, only_in_object: bool, keepers: Any, hidden: bool) -> list[bool]:
        return [True] * len(chunks)

    async def count_change(reporter: str) -> None: ...

    parts: Any = dict.fromkeys(["cluster", "lookups", "allocation", "assigning", "evictions", "removals", "policies"])
    orchestrator: Any = SimpleNamespace(reports=SimpleNamespace(withdraw=withdraw, count_change=count_change), **parts)
    unused: Any = None
    servicer = OrchestratorServicer(orchestrator, unused, unused, [])
    for number in range(2):
        request_.chunks.add(key=bytes([number]) * 32, bucket=bytes(32))
    assert list((await servicer.Withdraw(request_, None)).withdrawn) == withdrawn
