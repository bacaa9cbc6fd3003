"""The verdict on a cluster: each check by its code, the worst decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.model.health import Verdict, failed_checks, unreachable, verdict_of
from quire.model.nodes import DecoderInfo, GatewayInfo, Node, SchedulerInfo, StorageInfo, StorageState
from quire_tools.cli.views.health import plain

_STORAGE = Node(node_id="storage-0", about=StorageInfo())
_OUT = StorageState.DECOMMISSIONED
_REMOVABLE = Node(node_id="storage-9", about=StorageInfo(reached=_OUT), state=_OUT)
_SCHEDULER = Node(node_id="scheduler", about=SchedulerInfo())
_GATEWAY = Node(node_id="gateway-0", about=GatewayInfo())
_DECODER = Node(node_id="decoder-0", about=DecoderInfo(), notes={"models": "1"})
_WELL = (_STORAGE, _SCHEDULER, _GATEWAY, _DECODER)


def test_a_cluster_that_is_well() -> None:
    assert failed_checks(_WELL) == [] and verdict_of([]) is Verdict.OK
    assert plain([]) == {"verdict": "OK", "checks": []}


@pytest.mark.parametrize(
    ("nodes", "code", "verdict", "node"),
    [
        ((_GATEWAY, _SCHEDULER), "NO_STORAGE", Verdict.ERR, ""),
        ((_STORAGE, _GATEWAY), "NO_SCHEDULER", Verdict.WARN, ""),
        ((*_WELL, replace(_GATEWAY, protocol_version=3)), "MIXED_VERSIONS", Verdict.WARN, ""),
        ((*_WELL, replace(_STORAGE, node_id="gone", is_away=True)), "NODE_AWAY", Verdict.WARN, "gone"),
        ((*_WELL, _REMOVABLE), "NODE_DECOMMISSIONED", Verdict.WARN, "storage-9"),
        ((replace(_STORAGE, stats={"corrupt": 3.0}), *_WELL[1:]), "CORRUPT_CHUNKS", Verdict.WARN, "storage-0"),
        ((replace(_STORAGE, stats={"alone": 3.0}), *_WELL[1:]), "ONE_COPY", Verdict.WARN, "storage-0"),
        ((replace(_STORAGE, stats={"rate.fallback": 1.0}), *_WELL[1:]), "NO_RATES", Verdict.WARN, "storage-0"),
        ((replace(_STORAGE, stats={"object lag": 1e5}), *_WELL[1:]), "OBJECT_LAG", Verdict.WARN, "storage-0"),
        ((replace(_STORAGE, notes={"io": "threads"}), *_WELL[1:]), "SLOW_DRIVES", Verdict.WARN, "storage-0"),
        ((*_WELL, replace(_GATEWAY, node_id="late", stats={"late_ms": 900.0})), "LATE_GATEWAY", Verdict.WARN, "late"),
        ((*_WELL, replace(_DECODER, node_id="bare", notes={"models": "0"})), "NO_VAE", Verdict.WARN, "bare"),
    ],
)
def test_each_check(nodes: tuple[Node, ...], code: str, verdict: Verdict, node: str) -> None:
    (check,) = failed_checks(nodes)
    assert (check.code, check.verdict, check.node) == (code, verdict, node)
    assert check.problem and check.advice and verdict_of([check]) is verdict


def test_the_worst_decides_and_comes_first() -> None:
    failed = failed_checks([_GATEWAY, replace(_GATEWAY, node_id="late", stats={"late_ms": 900.0})])
    assert [check.code for check in failed] == ["NO_STORAGE", "LATE_GATEWAY"]
    assert verdict_of(failed) is Verdict.ERR
    assert verdict_of([unreachable("DeadlineExceeded")]) is Verdict.ERR


def test_small_figures_are_no_problem() -> None:
    busy = replace(_STORAGE, stats={"object lag": 10.0, "healed": 2.0})
    assert not failed_checks([busy, _SCHEDULER, replace(_GATEWAY, stats={"late_ms": 5.0})])


def test_a_node_that_is_away_stores_nothing() -> None:
    """The only storage node: the cluster does not serve, and the reason stands beside it."""
    failed = failed_checks([replace(_STORAGE, is_away=True), *_WELL[1:]])
    assert [check.code for check in failed] == ["NO_STORAGE", "NODE_AWAY"]
