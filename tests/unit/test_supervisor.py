"""Services that end are started again; their ports stay."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path

from quire_tools.local.ports import free_ports, remembered_ports
from quire_tools.local.supervisor import Supervisor


@dataclass
class _Processes:
    down: dict[str, int] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)

    def ended(self) -> dict[str, int]:
        return dict(self.down)

    def last_words(self, name: str) -> str:
        return f"no space left (logs/{name}.log)"

    def start_again(self, name: str) -> None:
        self.started.append(name)
        del self.down[name]


def test_what_goes_on_ending_is_started_later_and_later() -> None:
    processes, said = _Processes(), list[str]()
    supervisor, now_s, waits = Supervisor(processes, said.append), 0.0, []
    for _ in range(9):
        processes.down["decoder-0"] = -9
        began_s, count = now_s, len(processes.started)
        while len(processes.started) == count:
            supervisor.look(now_s)
            now_s += 0.25
        waits.append(now_s - 0.25 - began_s)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert said[:3] == [
        "decoder-0 ended with status -9; it is started again in 0.5 s",
        "  no space left (logs/decoder-0.log)",
        "decoder-0 was started again",
    ]
    now_s += 60
    processes.down["decoder-0"] = 1
    supervisor.look(now_s)
    supervisor.look(now_s + 0.5)
    assert len(processes.started) == 10, "it was well meanwhile"


def test_ports_stay_what_they_were(tmp_path: Path) -> None:
    """Unless one is taken, or there are to be more."""
    file = tmp_path / "ports.json"
    before = remembered_ports(file, 3)
    assert remembered_ports(file, 3) == before
    assert before[1] not in remembered_ports(file, 3, but=[before[1]]), "it was asked for, for a service by name"
    assert len(remembered_ports(file, 4)) == 4
    before = remembered_ports(file, 4)
    with socket.socket() as other:
        other.bind(("127.0.0.1", before[2]))
        other.listen()
        assert before[2] not in remembered_ports(file, 4)
    for text in ("", "{}", "[1, 2]", json.dumps([*free_ports(3), "x"]), "null"):
        file.write_text(text)
        assert len(remembered_ports(file, 4)) == 4
