"""Roles of callers with member certificates, and the methods that each role may call.

A method that the table does not name is refused to everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.wire.tls import OPERATOR, SERVICES

_MEMBERS: Final = frozenset(SERVICES)
_ALL: Final = _MEMBERS | {OPERATOR}
_GATEWAY: Final = frozenset({"gateway"})
_STORAGE: Final = frozenset({"storage"})
_ORCHESTRATOR: Final = frozenset({"orchestrator"})
_DECODER: Final = frozenset({"decoder"})

_OF_ORCHESTRATOR: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("Heartbeat", "Leave", "ListNodes"), _MEMBERS),
    **dict.fromkeys(("Allocate", "Evict", "Demote", "Assign"), _GATEWAY),
    **dict.fromkeys(("PutImage", "HeadImage", "DeleteImage", "ListImages", "RouteImage", "FinishImage"), _GATEWAY),
    **dict.fromkeys(("SetPolicy", "SetTenant", "SetTheta", "SetObjectTheta"), _GATEWAY),
    **dict.fromkeys(("SetDraining", "Decommission", "CheckRemoval"), _GATEWAY),
    **dict.fromkeys(("Commit", "ExpectObjects", "EvictChunks", "Locate", "ListPolicies"), _GATEWAY | _STORAGE),
    **dict.fromkeys(("CommitObjects", "Join", "Withdraw", "WithdrawHeld", "GetGenerations"), _STORAGE),
    **dict.fromkeys(("GetListing", "ListHoldings", "TakeDrops", "SettleDrops"), _STORAGE),
    **dict.fromkeys(("ReportDamage", "ReportRebuilt"), _STORAGE),
}
_OF_STORAGE: Final[Mapping[str, frozenset[str]]] = {
    "Deliver": _GATEWAY | _STORAGE | _DECODER,
    **dict.fromkeys(("Ingest", "Stop", "Prefetch", "SendNonce"), _GATEWAY),
    **dict.fromkeys(("Drop", "DeleteObjects", "CompareIndex", "Raise", "GiveUp"), _ORCHESTRATOR),
    **dict.fromkeys(("Describe", "Replicate"), _STORAGE),
}
_OF_DECODER: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("Decode", "Abandon", "EncodeLatent"), _GATEWAY),
    "ReadCached": _DECODER,
    "WriteBack": _GATEWAY | _DECODER,
}
_OF_SCHEDULER: Final = dict.fromkeys(("Admit", "Renew", "Finish", "Observe"), _STORAGE)
_OF_ADMIN: Final = dict.fromkeys(
    (
        *("Status", "SetPolicy", "SetTenant", "ListPolicies", "SetTheta", "SetObjectTheta", "Watch", "ListSpans"),
        *("SetDraining", "Decommission", "CheckRemoval"),
    ),
    frozenset({OPERATOR}),
)
_OF_CLIENTS: Final = dict.fromkeys(
    (
        *("Session", "Lookup", "Fetch", "Retrieve", "Store", "Release", "Evict", "Demote", "Retain"),
        *("Prefetch", "ProveAddress", "Assign"),
        *("PutLatent", "PutPicture", "GetLatent", "HeadImage", "GetImage", "DeleteImage", "ListImages", "Status"),
    ),
    _ALL,
)
ROLES: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "quire.v1.OrchestratorService": _OF_ORCHESTRATOR,
    "quire.v1.StorageService": _OF_STORAGE,
    "quire.v1.DecoderService": _OF_DECODER,
    "quire.v1.SchedulerService": _OF_SCHEDULER,
    "quire.v1.AdminService": _OF_ADMIN,
    "quire.v1.GatewayService": _OF_CLIENTS,
}


def roles_of(path: str) -> frozenset[str]:
    """Return the roles that may call a method (`/package.Service/Name`)."""
    service, _, method = path.lstrip("/").partition("/")
    return ROLES.get(service, {}).get(method, frozenset())
