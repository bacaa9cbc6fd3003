"""Checks of a cluster's health: problems, advice, and one verdict, for `quire health`, `quire status` and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from quire.model.nodes import Node, Role, StorageInfo, StorageState


class Verdict(Enum):
    """State of a cluster, by its worst check; the value is the exit status of `quire health`."""

    OK = 0
    WARN = 1
    """It serves, but slower than it could, or with less protection."""
    ERR = 2
    """It does not serve."""


class Check(NamedTuple):
    """A check that failed.

    Attributes:
        code: For programs; it stays the same in later releases.
        verdict: Verdict on the cluster if nothing else fails.
        node: Id of the member; "" for the cluster.
        problem: In words.
        advice: The remedy, or the next step.
    """

    code: str
    verdict: Verdict
    node: str
    problem: str
    advice: str


class _Rule(NamedTuple):
    """`problem`: of a member; "" where the check passes."""

    code: str
    verdict: Verdict
    role: Role
    problem: Callable[[Node], str]
    advice: str


def _stat(name: str, text: str) -> Callable[[Node], str]:
    """Return the problem that a statistic is not 0; `text` has its value as {0:.0f}."""

    def problem(node: Node) -> str:
        value = node.stats.get(name, 0)
        return text.format(value) if value else ""

    return problem


def _corrupt(node: Node) -> str:
    corrupt, healed = node.stats.get("corrupt", 0), node.stats.get("healed", 0)
    return f"{corrupt:.0f} chunks did not match their checksums, {healed:.0f} healed" if corrupt else ""


def may_stop(node: Node) -> bool:
    """Return whether a storage node is decommissioned, and has reported that it refuses stores."""
    return isinstance(node.about, StorageInfo) and node.about.reached is StorageState.DECOMMISSIONED


def _object_lag(node: Node) -> str:
    lag = node.stats.get("object lag", 0)
    return f"{lag:.0f} chunks wait for the object tier" if lag >= _LAG_CHUNKS else ""


def _late(node: Node) -> str:
    late_ms = node.stats.get("late_ms", 0)
    return f"its event loop is {late_ms:.0f} ms late" if late_ms >= _LATE_MS else ""


def _full(node: Node) -> str:
    share = node.stats.get("disk MiB", 0) * 2**20 / node.capacity_bytes if node.capacity_bytes else 0.0
    if share < _FULL:  # memory alone is to be full
        return ""
    return f"its drives are {share:.0%} full: chunks are not evicted as fast as they come"


CERTIFICATE_DAYS: Final = "certificate days"
"""Statistic of members with certificates: days until the first of them ends, 0 if one has ended or cannot be read."""
_CERTIFICATE_DAYS_MIN: Final = 14
_CERTIFICATE_ADVICE: Final = "`quire certs` again on the same folder, or look at cert-manager; no restart is needed"


def certificate_checks(days: float | None, node: str = "", *, owner: str = "") -> list[Check]:
    """Return the check that fails if a certificate ends soon, or has ended.

    Args:
        days: Days that are left, 0 if it has ended or cannot be read; None without a certificate.
        node: Id of the member; "" for an owner that is none.
        owner: In words, for one that is no member.
    """
    if days is None or days >= _CERTIFICATE_DAYS_MIN:
        return []
    prefix = f"{owner}: " if owner else ""
    if days > 0:
        problem = f"{prefix}a certificate ends in {days:.0f} days"
        return [Check("CERTIFICATE_ENDS", Verdict.WARN, node, problem, _CERTIFICATE_ADVICE)]
    problem = f"{prefix}a certificate has ended, or cannot be read"
    return [Check("CERTIFICATE_ENDED", Verdict.ERR, node, problem, _CERTIFICATE_ADVICE)]


_FULL: Final = 0.99
_LAG_CHUNKS: Final = 10_000
_LATE_MS: Final = 200.0
_RULES: Final = (
    _Rule(
        "NODE_AWAY",
        Verdict.WARN,
        Role.STORAGE,
        lambda node: "it is not alive, and was not decommissioned" if node.is_away else "",
        "start it; if it is gone for good: `quire safe-to-remove`, then `quire decommission --lose-chunks`",
    ),
    _Rule(
        "NODE_DECOMMISSIONED",
        Verdict.WARN,
        Role.STORAGE,
        lambda node: "it is decommissioned, and not stopped" if may_stop(node) else "",
        "stop it once `quire safe-to-remove` says so, or have it used again: `quire drain --undo`",
    ),
    _Rule(
        "CORRUPT_CHUNKS",
        Verdict.WARN,
        Role.STORAGE,
        _corrupt,
        "none was delivered; replace the drive if the count grows (docs/operations/runbook.md)",
    ),
    _Rule(
        "ONE_COPY",
        Verdict.WARN,
        Role.STORAGE,
        _stat("alone", "{0:.0f} replicated chunks have one copy, or were not looked at yet"),
        "wait, or add a storage node in another zone; do not stop this one until it is 0",
    ),
    _Rule(
        "CHUNKS_UNREADABLE",
        Verdict.WARN,
        Role.STORAGE,
        _stat("quarantined", "{0:.0f} chunks cannot be read, and have no other copy"),
        "look at its drives; the chunks are read again by themselves (docs/operations/runbook.md)",
    ),
    _Rule(
        "DRIVES_FAILED",
        Verdict.WARN,
        Role.STORAGE,
        _stat("failed drives", "{0:.0f} drives are not used any more, after too many errors"),
        "replace them, then restart the node (docs/operations/runbook.md)",
    ),
    _Rule(
        "STORAGE_FULL",
        Verdict.WARN,
        Role.STORAGE,
        _full,
        "leases or an object tier that does not answer keep chunks; else add drives",
    ),
    _Rule(
        "NO_RATES",
        Verdict.WARN,
        Role.STORAGE,
        _stat("rate.fallback", "no scheduler answers"),
        "look at the schedulers' logs; deliveries share links equally until one answers",
    ),
    _Rule(
        "OBJECT_LAG",
        Verdict.WARN,
        Role.STORAGE,
        _object_lag,
        "chunks of level `object` are not durable yet: look at the object store's latency and errors",
    ),
    _Rule(
        "SLOW_DRIVES",
        Verdict.WARN,
        Role.STORAGE,
        lambda node: "drives are read with threads: no io_uring here" if "threads" in node.notes.get("io", "") else "",
        "allow io_uring in the container's seccomp profile; `quire doctor` says what is missing",
    ),
    _Rule(
        "LATE_GATEWAY",
        Verdict.WARN,
        Role.GATEWAY,
        _late,
        "the process has too much to do: add gateways",
    ),
    _Rule(
        "NO_VAE",
        Verdict.WARN,
        Role.DECODER,
        lambda node: "it has no VAE: images cannot be decoded here" if node.notes.get("models") == "0" else "",
        "name folders with VAEs in QUIRE_DECODER_MODELS",
    ),
)


def unreachable(reason: str) -> Check:
    """Return the check for a cluster whose members cannot be listed."""
    return Check(
        "UNREACHABLE",
        Verdict.ERR,
        "",
        f"its members cannot be listed: {reason}",
        "does Redis answer (`redis-cli ping`), and what do an orchestrator and a gateway log?",
    )


def failed_checks(nodes: Sequence[Node]) -> list[Check]:
    """Return the checks that a cluster of these members fails, the worst first."""
    live = [node for node in nodes if not node.is_away]
    roles = Counter(node.role for node in live)
    failed = []
    if not roles[Role.STORAGE]:
        problem = "no storage node is a member: every look-up is a miss"
        failed.append(Check("NO_STORAGE", Verdict.ERR, "", problem, "start storage nodes, or look at why they left"))
    elif not roles[Role.SCHEDULER]:
        problem = "no scheduler is a member: deliveries share links equally"
        failed.append(Check("NO_SCHEDULER", Verdict.WARN, "", problem, "start a scheduler"))
    versions = sorted({node.protocol_version for node in live})
    if len(versions) > 1:
        problem = f"members speak the protocols {', '.join(map(str, versions))}"
        advice = "complete the update (docs/operations/upgrade.md)"
        failed.append(Check("MIXED_VERSIONS", Verdict.WARN, "", problem, advice))
    failed += [
        Check(rule.code, rule.verdict, node.node_id, problem, rule.advice)
        for node in nodes
        for rule in _RULES
        if node.role is rule.role and (problem := rule.problem(node))
    ]
    for node in nodes:
        failed += certificate_checks(node.stats.get(CERTIFICATE_DAYS), node.node_id)
    return sorted(failed, key=lambda check: -check.verdict.value)


def verdict_of(failed: Iterable[Check]) -> Verdict:
    """Return the worst verdict."""
    return max((check.verdict for check in failed), key=lambda verdict: verdict.value, default=Verdict.OK)
