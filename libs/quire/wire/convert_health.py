"""Between messages and the checks of a cluster's health."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quire.model.health import Check, Verdict, failed_checks
from quire.wire import convert
from quire.wire.v1 import common_pb2 as pb
from quire.wire.v1 import gateway_pb2, orchestrator_pb2

_VERDICTS: Final = {pb.VERDICT_OK: Verdict.OK, pb.VERDICT_WARN: Verdict.WARN, pb.VERDICT_ERR: Verdict.ERR}


def checks_from(response: gateway_pb2.StatusResponse | orchestrator_pb2.ListNodesResponse) -> list[Check]:
    """Return the checks that the cluster fails; of an orchestrator of the release before by its members alone."""
    if not response.checked:
        return failed_checks([convert.node_from(node) for node in response.nodes])
    return [
        Check(check.code, _VERDICTS.get(check.verdict, Verdict.WARN), check.node, check.problem, check.advice)
        for check in response.checks
    ]


def checks_to(checks: Iterable[Check]) -> list[pb.HealthCheck]:
    return [
        pb.HealthCheck(
            code=check.code,
            verdict=convert.inverse(_VERDICTS, check.verdict),
            node=check.node,
            problem=check.problem,
            advice=check.advice,
        )
        for check in checks
    ]
