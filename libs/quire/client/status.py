"""Calls that clients and operators share: the members of a cluster, and the checks that it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.model.health import Check
from quire.model.nodes import Node
from quire.wire import convert
from quire.wire.channels import call
from quire.wire.convert_health import checks_from
from quire.wire.v1 import gateway_pb2 as pb


async def members(method: Any, timeout_s: float, *, with_away: bool) -> Sequence[Node]:
    """Return the members, by the `Status` method of a stub; `with_away`: and the storage nodes that are away."""
    response = await call(method, pb.StatusRequest(with_away=with_away), timeout_s=timeout_s)
    return [convert.node_from(node) for node in response.nodes]


async def failed_checks(method: Any, timeout_s: float) -> Sequence[Check]:
    """Return the checks that the cluster fails, the worst first."""
    return checks_from(await call(method, pb.StatusRequest(), timeout_s=timeout_s))
