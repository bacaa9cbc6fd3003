"""`quire support-bundle`: one file with the facts for a report about a cluster that does not work, without secrets."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import platform
import re
import signal
import tarfile
import time
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from quire import PROTOCOL_VERSION, __version__
from quire.model.errors import InvalidRequest, QuireError, Unavailable
from quire.model.health import unreachable
from quire_server.config import value_of
from quire_tools.cli.cluster import looking
from quire_tools.cli.doctor import look as look_at_machine
from quire_tools.cli.views.health import plain as plain_health
from quire_tools.cli.views.status import plain as plain_node
from quire_tools.local import read_state

_LOG_BYTES: Final = 2 << 20
_SIGNALLED_S: Final = 0.5
"""Time in which a service writes into its log where its threads and tasks wait."""
_METRICS_S: Final = 2.0
_HIDDEN: Final = "(hidden)"
_SHOWN: Final = re.compile(
    r"(QUIRE|UCX|OMP|GLIBC)_.*|CUDA_VISIBLE_DEVICES|AWS_(DEFAULT_REGION|REGION|ENDPOINT_URL\w*|ALLOW_HTTP|CA_BUNDLE)"
    r"|OTEL_(SERVICE_NAME|EXPORTER_OTLP_ENDPOINT|EXPORTER_OTLP_PROTOCOL)"
)
"""Variables whose values are shown; of others of these prefixes the names are."""
_SECRET_NAME: Final = re.compile(r"SECRET|PASSWORD|TOKEN|CREDENTIAL|KEY|SALT|HEADER")
_LISTED: Final = ("QUIRE_", "UCX_", "AWS_", "OTEL_", "OMP_", "CUDA_", "GLIBC_")
_SECRET_MIN, _UNKNOWN_MIN = 6, 16
"""Characters of a secret, and of a value that may be one, from which on it is removed from other texts, too."""
_IN_URL: Final = re.compile(r"(\w+://)[^\s/]*@")
_IN_QUERY: Final = re.compile(r"([?&](?:password|token|secret|sig|signature|key)=)[^\s&]+", re.IGNORECASE)
_HANDLES: Final = ("SigCgt", "SigIgn")
console = Console()


class _Bundle:
    """Files of a bundle, from which `secrets` are removed, and passwords in addresses."""

    def __init__(self, archive: tarfile.TarFile, top: str, secrets: set[str]) -> None:
        self._archive = archive
        self._top = top
        self._secrets = secrets

    def add(self, name: str, text: str) -> None:
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        data = _IN_QUERY.sub(rf"\1{_HIDDEN}", _IN_URL.sub(rf"\1{_HIDDEN}@", text)).encode()
        member = tarfile.TarInfo(f"{self._top}/{name}")
        member.size, member.mtime = len(data), int(time.time())
        self._archive.addfile(member, io.BytesIO(data))

    def add_json(self, name: str, value: Any) -> None:
        self.add(name, json.dumps(value, indent=2, default=str))


def support_bundle(file: Path | None, folder: Path, gateway: str, admin: str, timeout_s: float) -> Path:
    """Write the bundle, and return its path. Of the cluster on `folder` also logs, settings and metrics.

    A cluster that does not answer is no error: it is a check that fails.
    """
    top = time.strftime("quire-support-%Y%m%d-%H%M%S")
    path = file or Path(f"{top}.tar.gz")
    is_local = not gateway and not admin
    state = _state_of(folder) if is_local else {}
    environments = {name: _environment(pid) for name, pid in _services(state).items()}
    try:
        opened = path.open("wb")
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field="file") from None
    with console.status("collecting"), opened, tarfile.open(fileobj=opened, mode="w:gz") as archive:
        bundle = _Bundle(archive, top, _secrets(folder if is_local else None, environments.values()))
        bundle.add_json("about.json", _about())
        bundle.add_json("machine.json", _machine())
        _add_cluster(bundle, folder, gateway, admin, timeout_s)
        for name, environment in environments.items():
            bundle.add(f"settings/{name}.txt", "\n".join(_settings(environment)))
        if is_local:
            _add_processes(bundle, folder, state)
    kibibytes = path.stat().st_size / 1024
    console.print(f"{path} ({kibibytes:.0f} KiB), without secrets; names of models and members are in it")
    return path


def _machine() -> list[dict[str, object]]:
    return [{**finding._asdict(), "level": finding.level.value} for finding in look_at_machine([], "")]


def _about() -> dict[str, object]:
    return {
        "quire": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _add_cluster(bundle: _Bundle, folder: Path, gateway: str, admin: str, timeout_s: float) -> None:
    """Add what the cluster reports of itself."""
    try:
        with looking(folder, gateway, admin, timeout_s=timeout_s) as look:
            checks, members = list(look.health()), look.members()
    except QuireError as error:
        checks, members = [unreachable(f"{error.code()}: {error}")], []
    bundle.add_json("health.json", plain_health(checks))
    bundle.add_json("status.json", [plain_node(node) for node in members])


def _state_of(folder: Path) -> dict[str, Any]:
    try:
        return read_state(folder)
    except Unavailable:  # its logs may say why it does not run
        return {}


def _services(state: dict[str, Any]) -> dict[str, int]:
    """Return the processes of Quire's services by name: not Redis, and none that has the number of one that ended."""
    services = {}
    for name, (pid, _) in state.get("processes", {}).items():
        with contextlib.suppress(OSError):
            if b"quire_" in Path(f"/proc/{pid}/cmdline").read_bytes():
                services[name] = pid
    return services


def _environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(variable.partition("=")[::2] for variable in raw.split("\0") if variable)
    return {}


def _add_processes(bundle: _Bundle, folder: Path, state: dict[str, Any]) -> None:
    """Add metrics and logs of the services of this machine; each logs first where its threads and tasks wait."""
    services = _services(state)
    for pid in services.values():
        with contextlib.suppress(OSError):
            if _handles_signal(pid):
                os.kill(pid, signal.SIGUSR1)
    for name, address in state.get("metrics", {}).items():
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=_METRICS_S) as answer:
                text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            text = f"no answer: {error}"
        bundle.add(f"metrics/{name}.txt", text)
    if services:
        time.sleep(_SIGNALLED_S)
    for log in sorted((folder / "logs").glob("*.log")):
        try:
            with log.open("rb") as opened:
                opened.seek(max(0, log.stat().st_size - _LOG_BYTES))
                text = opened.read().decode(errors="replace")
        except OSError as error:
            text = f"it cannot be read: {error}"
        bundle.add(f"logs/{log.name}", text)


def _handles_signal(pid: int) -> bool:
    """Whether SIGUSR1 does not end a process: one that is still starting does not handle it yet."""
    bit = 1 << (signal.SIGUSR1 - 1)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(line.startswith(_HANDLES) and int(line.split()[1], 16) & bit for line in lines)


def _settings(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of Quire and of its libraries, with values unless they may be secret."""
    names = sorted(name for name in environment if name.startswith(_LISTED))
    return [f"{name}={environment[name] if _is_shown(name) else _HIDDEN}" for name in names]


def _is_shown(name: str) -> bool:
    return bool(_SHOWN.fullmatch(name)) and not _SECRET_NAME.search(name)


def _secrets(folder: Path | None, environments: Iterable[Mapping[str, str]]) -> set[str]:
    """Return the strings to remove from all texts: the cluster's secret, and values of variables that are not shown."""
    variables = [variable for environment in (os.environ, *environments) for variable in environment.items()]
    secrets = {value for name, value in variables if _SECRET_NAME.search(name)}
    secrets |= {
        value
        for name, value in variables
        if name.startswith(_LISTED) and not _is_shown(name) and len(value) >= _UNKNOWN_MIN
    }
    with contextlib.suppress(QuireError):
        secrets |= {value_of(name, os.environ) for name in ("QUIRE_CLUSTER_SECRET", "QUIRE_CLUSTER_SECRET_ALSO")}
    if folder is not None:
        with contextlib.suppress(OSError):
            secrets.add((folder / "secret").read_text().strip())
    return {secret for secret in secrets if len(secret) >= _SECRET_MIN}
