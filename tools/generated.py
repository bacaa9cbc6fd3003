"""Code and manifests made from elsewhere: the names of all variables, from the services' configuration classes; the
alerts for Kubernetes, from observability/alerts.yaml.

python tools/generated.py            write both
python tools/generated.py --check    status 1 if one says something else
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

from quire_server.config import variable_name

ROOT = Path(__file__).parents[1]
VARIABLES = ROOT / "libs" / "quire_server" / "variables.py"
ALERTS, RULES = ROOT / "observability" / "alerts.yaml", ROOT / "k8s" / "components" / "monitoring" / "rules.yaml"
ELSEWHERE = (
    *("QUIRE_CLIENT_CA", "QUIRE_CLIENT_CERT", "QUIRE_CLIENT_KEY", "QUIRE_CLIENT_UIDS", "QUIRE_KEY_SECRET"),
    *("QUIRE_OBJECT_KEY", "QUIRE_OBJECT_SECRET", "QUIRE_OBJECT_URL", "QUIRE_REDIS_PASSWORD"),
    *("QUIRE_TOKEN", "QUIRE_TRACE_FOLDER"),
)
"""Read by clients, the command line, telemetry and the manifests."""
SERVICES = ("gateway", "orchestrator", "storage", "decoder", "scheduler")


def names() -> str:
    """The module with the names of all variables."""
    found = set(ELSEWHERE)
    for service in SERVICES:
        module = importlib.import_module(f"quire_{service}.config")
        fields = dataclasses.fields(getattr(module, f"{service.capitalize()}Config"))
        found |= {variable_name(module.PREFIX, field) for field in fields}
    lines = "\n".join(f'        "{name}",' for name in sorted(found))
    return (
        '"""Names of all environment variables. Made by `make generated`; do not edit."""\n\n'
        "from __future__ import annotations\n\n"
        "from typing import Final\n\n"
        f"KNOWN: Final = frozenset(\n    (\n{lines}\n    )\n)\n"
    )


def rules() -> str:
    """The alerts as the Prometheus operator takes them."""
    groups = ALERTS.read_text().partition("groups:\n")[2]
    head = "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: quire\nspec:\n  groups:\n"
    made = "# Made of observability/alerts.yaml by `make generated`; do not edit.\n"
    return made + head + "".join(f"  {line}\n" for line in groups.splitlines())


def main() -> None:
    wanted = {VARIABLES: names(), RULES: rules()}
    for file, text in wanted.items():
        if "--check" not in sys.argv[1:]:
            file.write_text(text)
        elif file.read_text() != text:
            sys.exit(f"{file.name} is not what it is made from; run `make generated`")


if __name__ == "__main__":
    main()
