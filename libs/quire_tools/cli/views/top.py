"""`quire top`: the cluster as it works, refreshed each second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quire.model.errors import QuireError
from quire.model.nodes import Node, Role
from quire_tools.cli.cluster import looking

_SPARKS = " ▁▂▃▄▅▆▇█"
_HISTORY = 30
_DELIVERIES = 8
# What of a role's stats is shown: (figure, as what, per second).
_SHOWN: Mapping[Role, tuple[tuple[str, str, bool], ...]] = {
    Role.STORAGE: (
        ("delivered bytes", "out", True),
        ("ingested bytes", "in", True),
        ("deliveries", "deliveries", False),
        ("ingests", "stores", False),
        ("hits memory", "memory/s", True),
        ("hits disk", "disk/s", True),
        ("hits object", "object/s", True),
        ("rate.granted", "granted", False),
        ("corrupt", "corrupt", False),
    ),
    Role.DECODER: (
        ("requests", "images/s", True),
        ("hits.rendition", "rendition hits/s", True),
        ("hits.image", "image hits/s", True),
        ("hits.latent", "latent hits/s", True),
        ("queue", "queue", False),
        ("cache.rendition_bytes", "renditions", False),
        ("cache.image_bytes", "images", False),
        ("cache.latent_bytes", "latents", False),
    ),
    Role.GATEWAY: (("transfers", "transfers", False), ("shed", "shed/s", True)),
    Role.SCHEDULER: (("leads", "leader", False), ("deliveries", "admitted", False)),
}
_BYTES = (
    *("delivered bytes", "ingested bytes", "rate.granted"),
    *("cache.rendition_bytes", "cache.image_bytes", "cache.latent_bytes"),
)
console = Console()


def top(folder: Path, gateway: str, admin: str, interval_s: float, rounds: int) -> None:
    """Draw until Ctrl-C, or `rounds` times. A gateway that does not answer is shown as such, and retried."""
    with looking(folder, gateway, admin) as look:
        screen = _Screen()
        with Live(console=console, screen=console.is_terminal and not rounds, auto_refresh=False) as live:
            drawn_rounds = 0
            while True:
                try:
                    live.update(screen.draw(list(look.members()), time.monotonic()), refresh=True)
                except QuireError as error:
                    live.update(Text(f"{error.code()}: {error}", style="bold red"), refresh=True)
                drawn_rounds += 1
                if drawn_rounds == rounds:
                    return
                time.sleep(interval_s)


class _Screen:
    """Remembers the stats of before: rates are differences."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[str, float, Mapping[str, float]]] = {}
        self._rates: dict[tuple[str, str], float] = {}
        self._history: list[float] = []

    def draw(self, nodes: list[Node], now_s: float) -> Group:
        table = Table("node", "role", "filled", "now", expand=True)
        for node in nodes:
            self._measure(node, now_s)
            table.add_row(node.node_id, node.role.value, _filled(node), self._now(node))
        self._history = [*self._history, sum(self._rates.get((n.node_id, "delivered bytes"), 0.0) for n in nodes)]
        self._history = self._history[-_HISTORY:]
        return Group(table, _running(nodes), _links(nodes), _spark(self._history))

    def _measure(self, node: Node, now_s: float) -> None:
        """Heartbeats come each second: a rate is renewed when a new one has come."""
        previous = self._before.get(node.node_id)
        if previous is not None and previous[0] == node.incarnation:
            if previous[2] == node.stats and now_s - previous[1] < 3:
                return
            for name, value in node.stats.items():
                passed_s = max(1e-3, now_s - previous[1])
                self._rates[node.node_id, name] = max(0.0, (value - previous[2].get(name, 0.0)) / passed_s)
        self._before[node.node_id] = (node.incarnation, now_s, node.stats)

    def _now(self, node: Node) -> Text:
        parts = []
        for name, label, per_second in _SHOWN.get(node.role, ()):
            if name in node.stats:
                value = self._rates.get((node.node_id, name), 0.0) if per_second else node.stats[name]
                text = f"{value / 1e6:.1f} MB/s" if name in _BYTES else f"{value:.3g}"
                parts.append(f"{label} [bold]{text}[/]")
        return Text.from_markup("  ".join(parts))


def _filled(node: Node) -> ProgressBar | str:
    return ProgressBar(node.capacity_bytes, node.used_bytes, width=20) if node.capacity_bytes else ""


def _running(nodes: list[Node]) -> Text:
    """The deliveries that have run longest, and how many of their layers have been sent."""
    rows = sorted(
        ((delivery, node.node_id) for node in nodes for delivery in node.running), key=lambda of: -of[0].running_ms
    )
    lines = []
    for delivery, node_id in rows[:_DELIVERIES]:
        full = 12 * delivery.layers_sent // max(1, delivery.layers)
        layers = f"{delivery.layers_sent:>3} of {delivery.layers} layers"
        granted = f"{delivery.rate_bytes_per_s / 1e6:.0f} MB/s" if delivery.rate_bytes_per_s else "no rate"
        pace = f"{delivery.running_ms / 1000:.1f} s · {granted}"
        lines.append(f"{delivery.short_id} {'█' * full}{'░' * (12 - full)} {layers} · {node_id} · {pace}")
    return Text("\n".join(lines), style="green")


def _links(nodes: list[Node]) -> Text:
    stats = next((n.stats for n in nodes if n.role is Role.SCHEDULER and n.stats.get("leads")), {})
    lines = []
    for name in sorted(stats):
        if name.startswith("link.") and name.endswith(".budget"):
            link = name.removeprefix("link.").removesuffix(".budget")
            granted, budget = stats[f"link.{link}.granted"], stats[name]
            full = round(20 * min(1.0, granted / budget)) if budget else 0
            lines.append(
                f"link {link}  {'█' * full}{'░' * (20 - full)}  {granted / 1e6:.0f} of {budget / 1e6:.0f} MB/s"
            )
    return Text("\n".join(lines) or "no scheduler is the leader", style="cyan")


def _spark(history: list[float]) -> Text:
    peak = max(history, default=0.0)
    bars = "".join(_SPARKS[round((len(_SPARKS) - 1) * value / peak)] if peak else _SPARKS[0] for value in history)
    return Text(f"delivered {bars} {history[-1] / 1e6:.1f} MB/s (most {peak / 1e6:.1f})")
