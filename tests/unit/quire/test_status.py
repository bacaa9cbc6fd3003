"""`quire status`: what fits 80 columns, and what an operator is told to look at."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from quire.model.health import failed_checks
from quire.model.nodes import DecoderInfo, GatewayInfo, Node, SchedulerInfo, StorageInfo
from quire_tools.cli.views.status import drawn, plain, size


def _text(*nodes: Node) -> str:
    out = StringIO()
    Console(file=out, width=80).print(drawn(nodes, failed_checks(nodes)))
    return out.getvalue()


def _storage(name: str, **stats: float) -> Node:
    about = StorageInfo(capacity_bytes=900 << 30, used_bytes=450 << 30)
    full = {"chunks": 123_456_789.0, "memory MiB": 65_536.0, "hits memory": 80.0, "hits disk": 15.0, "hits object": 5.0}
    full |= {"deliveries": 1024.0, "rate.granted": 12.5e9}
    return Node(node_id=name, about=about, stats=full | stats)


def test_full_figures_fit_80_columns() -> None:
    links = {"leads": 1.0, "deliveries": 9999.0, "link.a.budget": 12.5e9, "link.a.granted": 12.4e9}
    text = _text(
        *(_storage(f"quire-storage-{number}") for number in range(3)),
        Node(node_id="quire-gateway-7d9c5b8f6-x2x7p", about=GatewayInfo(), stats={"sessions": 1000.0}),
        Node(node_id="quire-scheduler-0", about=SchedulerInfo(), stats=links),
        Node(
            node_id="quire-decoder-6b8d9",
            about=DecoderInfo(),
            stats={"requests": 1e6, "hits.image": 3.0, "misses": 1.0},
        ),
    )
    lines = text.splitlines()
    assert lines[0].split(" · ")[:2] == ["OK", "1 decoder, 1 gateway, 1 scheduler, 3 storage"]
    assert "1.3 TiB of 2.6 TiB stored" in lines[0]
    row = next(line for line in lines if line.startswith("quire-storage-0"))
    assert "███░░░  50%" in row and "80% 15% 5%" in row and "11.6 GiB/s" in row
    assert "75%" in next(line for line in lines if line.startswith("quire-decoder"))
    assert "!" not in text


def test_what_is_not_well_comes_first() -> None:
    scheduler = Node(node_id="scheduler", about=SchedulerInfo())
    text = _text(_storage("s", corrupt=3, healed=2, alone=7, **{"rate.fallback": 1}), scheduler)
    assert text.startswith("WARN")
    worries = [line for line in text.splitlines() if line.startswith("!")]
    assert len(worries) == 3
    assert "3 chunks did not match" in worries[0] and "2 healed" in worries[0]
    assert "every look-up is a miss" in _text(Node(node_id="g", about=GatewayInfo()))


def test_a_program_gets_everything() -> None:
    node = _storage("s")
    told = json.loads(json.dumps(plain(node)))
    assert told["node"] == "s" and told["stats"] == node.stats and told["capacity_bytes"] == 900 << 30


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (5 << 50, "5.0 PiB")]
)
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text
