"""A real Alertmanager with the shipped configuration notifies of a cause, and not of the alerts that follow from it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_tools.local.ports import free_ports
from tests.polling import until

_FOLDER = Path(__file__).resolve().parents[2] / "observability"
_FILE = _FOLDER / "alertmanager.yaml"


def test_it_names_alerts_that_there_are() -> None:
    groups = yaml.safe_load((_FOLDER / "alerts.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert set(re.findall(r"Quire\w+", _FILE.read_text())) - {"Quire"} <= alerts


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if program is None:
        pytest.skip("no Alertmanager here (Debian: apt install prometheus-alertmanager)")
    folder = tmp_path_factory.mktemp("alertmanager")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [program, f"--config.file={_FILE}", f"--storage.path={folder}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen([*command, "--cluster.listen-address="], stdout=log, stderr=log)
        try:
            until(lambda: _ask(address, "status"), "Alertmanager answers", timeout_s=60, ignored=(OSError,))
            yield address
        finally:
            running.kill()
            running.wait()


def _ask(address: str, path: str, alerts: list[dict[str, Any]] | None = None) -> Any:
    data = None if alerts is None else json.dumps(alerts).encode()
    request = urllib.request.Request(f"http://{address}/api/v2/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read()
    return json.loads(text) if text else {}


@pytest.mark.parametrize(
    ("firing", "notified"),
    [
        (["QuireNoOrchestrator", "QuireServiceDown:orchestrator", "QuireNoStorage"], {"QuireNoOrchestrator"}),
        (["QuireNoOrchestrator", "QuireServiceDown:storage"], {"QuireNoOrchestrator", "QuireServiceDown:storage"}),
        (["QuireRedis", "QuireErrors", "QuireNoScheduler", "QuireCorruption"], {"QuireRedis", "QuireCorruption"}),
        (["QuireLate", "QuireRedis"], {"QuireLate"}),
        (["QuireLate", "QuireRedis@other"], {"QuireLate", "QuireRedis@other"}),
        (["QuireNoStorage", "QuireUnhealthy"], {"QuireNoStorage"}),
        (["QuireNoStorage"], {"QuireNoStorage"}),
    ],
)
def test_alerts_that_follow_from_another_are_silent(alertmanager: str, firing: list[str], notified: set[str]) -> None:
    """`NAME:ROLE@INSTANCE`; of `one` without."""
    labels = {}
    for name in firing:
        alert, _, instance = name.partition("@")
        labels[name] = dict(zip(("alertname", "role"), alert.split(":"), strict=False), instance=instance or "one")
    alerts = [{"labels": {**own, "severity": "page"}} for own in labels.values()]
    _ask(alertmanager, "alerts", alerts)
    try:

        def active() -> set[str] | None:
            """Return the alerts that are not silent, None until all are processed."""
            states = {
                name: answer["status"]["state"]
                for answer in _ask(alertmanager, "alerts")
                for name, own in labels.items()
                if own.items() <= answer["labels"].items()
            }
            if len(states) < len(firing) or "unprocessed" in states.values():
                return None
            return {name for name, state in states.items() if state == "active"}

        until(lambda: active() == notified, lambda: f"active: {active()}")
        assert active() == notified
    finally:
        over = {"endsAt": "2020-01-01T00:00:00Z", "startsAt": "2019-01-01T00:00:00Z"}
        _ask(alertmanager, "alerts", [{**alert, **over} for alert in alerts])
        until(lambda: not _ask(alertmanager, "alerts"), "they are over")
