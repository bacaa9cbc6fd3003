"""`quire status`: a table for each role that fits 80 columns; problems have a column of their own."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.model.errors import DeadlineExceeded, MetadataUnavailable
from quire.model.health import Check, Verdict, may_stop, verdict_of
from quire.model.nodes import Node, Role
from quire_tools.cli.cluster import looking

_BAR: Final = 6
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
console = Console()


class _Column(NamedTuple):
    """`show`: a cell, of a node."""

    name: str
    show: Callable[[Node], str]


def status(folder: Path, gateway: str, admin: str, *, verbose: bool, as_json: bool) -> None:
    """Print the members, their contents, and problems."""
    with looking(folder, gateway, admin) as look:
        try:
            members, failed = look.members(), look.health()
        except (DeadlineExceeded, MetadataUnavailable) as error:
            raise type(error)(
                f"{error}; does Redis answer (`redis-cli ping`), and what does an orchestrator log?"
            ) from None
    nodes = sorted(members, key=lambda node: (node.role.value, node.node_id))
    if as_json:
        print(json.dumps([plain(node) for node in nodes], indent=2))
        return
    console.print(drawn(nodes, failed))
    if verbose:
        console.print(_details(nodes))


def plain(node: Node) -> dict[str, object]:
    """Return the status for a program."""
    return {
        "node": node.node_id,
        "role": node.role.value,
        "address": node.grpc_address,
        "incarnation": node.incarnation,
        "protocol": node.protocol_version,
        "state": node.state.value,
        "is_away": node.is_away,
        **{field.name: getattr(node.location, field.name) for field in dataclasses.fields(node.location)},
        "used_bytes": node.used_bytes,
        "capacity_bytes": node.capacity_bytes,
        "stats": dict(node.stats),
        "notes": dict(node.notes),
        "running": [
            {**dataclasses.asdict(running), "delivery_id": running.delivery_id.hex()} for running in node.running
        ],
    }


def drawn(nodes: Sequence[Node], failed: Sequence[Check]) -> Group:
    """A line of the whole, one for each failed check, then a table a role."""
    count = Counter(node.role.value for node in nodes if not node.is_away)
    storage = [node for node in nodes if node.role is Role.STORAGE]
    used, capacity = sum(node.used_bytes for node in storage), sum(node.capacity_bytes for node in storage)
    parts = [", ".join(f"{number} {role}" for role, number in sorted(count.items())) or "no members"]
    if capacity:
        parts.append(f"{size(used)} of {size(capacity)} stored")
    lines: list[RenderableType] = [Text(" · ".join([verdict_of(failed).name, *parts]), style="bold")]
    for check in failed:
        where = f"{check.node}: " if check.node else ""
        style = "bold red" if check.verdict is Verdict.ERR else "yellow"
        lines.append(Text(f"! {where}{check.problem}", style=style))
    return Group(*lines, *(_table(role, nodes) for role in _COLUMNS if any(node.role is role for node in nodes)))


def _table(role: Role, nodes: Iterable[Node]) -> Table:
    """Return the members of a role, without columns that are empty."""
    members = [node for node in nodes if node.role is role]
    columns = [column for column in _COLUMNS[role] if any(map(column.show, members))]
    table = Table(role.value, *(column.name for column in columns), box=None, header_style="dim", pad_edge=False)
    for node in members:
        table.add_row(node.node_id, *(column.show(node) for column in columns))
    return table


def _details(nodes: Iterable[Node]) -> Table:
    table = Table("node", "what", "value", box=None, header_style="dim", pad_edge=False)
    for node in nodes:
        about = {"address": node.grpc_address, "protocol": str(node.protocol_version), **node.notes}
        rows = [*sorted(about.items()), *((name, f"{value:g}") for name, value in sorted(node.stats.items()))]
        for at, (name, value) in enumerate(rows):
            table.add_row(node.node_id if at == 0 else "", name, value)
    return table


def size(value: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes all")


def count_of(value: float) -> str:
    """A count for people: 1234, 12.3 k, 4.5 M."""
    for unit in ("", " k", " M"):
        if value < (1000 if unit else 10_000):
            return f"{value:.1f}{unit}" if unit and value < 100 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.1f} G"


def _number(name: str) -> Callable[[Node], str]:
    return lambda node: count_of(node.stats.get(name, 0))


def _bytes_of(name: str, scale: float = 1.0, unit: str = "") -> Callable[[Node], str]:
    return lambda node: size(node.stats.get(name, 0) * scale) + unit


def _filled(node: Node) -> str:
    if node.is_away:
        return "away"
    if not node.capacity_bytes:
        return ""
    share = min(1.0, node.used_bytes / node.capacity_bytes)
    full = round(_BAR * share)
    return f"{'█' * full}{'░' * (_BAR - full)} {share:4.0%}"


def _state(node: Node) -> str:
    """Return the progress of a storage node's removal; "" for others."""
    if may_stop(node):
        return "refuses stores"
    return "" if node.stays or node.is_away else f"leaving, {count_of(node.stats.get('to copy', 0))} left"


def _shares(prefix: str, names: Sequence[str]) -> Callable[[Node], str]:
    """Return the shares of counts, in percent."""

    def show(node: Node) -> str:
        counts = [node.stats.get(f"{prefix}{name}", 0) for name in names]
        total = sum(counts)
        return " ".join(f"{count / total:.0%}" for count in counts) if total else "-"

    return show


def _image_hits(node: Node) -> str:
    hits = sum(value for name, value in node.stats.items() if name.startswith("hits."))
    requests = hits + node.stats.get("misses", 0)
    return f"{hits / requests:.0%}" if requests else "-"


def _links(node: Node) -> str:
    stats: Mapping[str, float] = node.stats
    budgets = [name for name in stats if name.startswith("link.") and name.endswith(".budget")]
    granted = sum(stats.get(name.removesuffix(".budget") + ".granted", 0) for name in budgets)
    return f"{size(granted)}/s of {size(sum(stats[name] for name in budgets))}/s" if budgets else "-"


_COLUMNS: Final[Mapping[Role, tuple[_Column, ...]]] = {
    Role.STORAGE: (
        _Column("filled", _filled),
        _Column("chunks", _number("chunks")),
        _Column("memory", _bytes_of("memory MiB", 2**20)),
        _Column("mem drive obj", _shares("hits ", ("memory", "disk", "object"))),
        _Column("runs", _number("deliveries")),
        _Column("rate", _bytes_of("rate.granted", unit="/s")),
        _Column("state", _state),
    ),
    Role.GATEWAY: (
        _Column("sessions", _number("sessions")),
        _Column("transfers", _number("transfers")),
        _Column("rejected", _number("shed")),
    ),
    Role.SCHEDULER: (
        _Column("leader", lambda node: "yes" if node.stats.get("leads") else "standby"),
        _Column("deliveries", _number("deliveries")),
        _Column("links", _links),
    ),
    Role.DECODER: (
        _Column("cache", _filled),
        _Column("images", _number("requests")),
        _Column("hits", _image_hits),
        _Column("queue", _number("queue")),
        _Column("decode", lambda node: f"{node.stats.get('decode_ms', 0):.0f} ms"),
    ),
}
