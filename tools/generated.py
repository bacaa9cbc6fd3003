"""Code and files that are made from others: the names of all variables, from the services' configuration classes;
the alerts of the Helm chart, from observability/alerts.yaml; the chart's schema, from its values; the blocking client's
calls, from `AsyncClient`.

python tools/generated.py            write them
python tools/generated.py --check    status 1 if one says something else
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import yaml

from quire_server.config import variable_name

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it sees its own folder only
from tools import sync_client

ROOT = Path(__file__).parents[1]
VARIABLES = ROOT / "libs" / "quire_server" / "variables.py"
ALERTS, CHART = ROOT / "observability" / "alerts.yaml", ROOT / "k8s" / "helm" / "quire"
SERVICES = ("gateway", "orchestrator", "storage", "decoder", "scheduler")
FREE = ("config", "env", "resources", "nodeSelector", "serviceAnnotations", "podAnnotations", "podLabels", "affinity")
"""Values of the chart that take any names."""
CLOSER: dict[str, dict[str, object]] = {
    "certificates": {"enum": ["helm", "cert-manager", "secrets"]},
    "digests": {
        "type": "object",
        "propertyNames": {"enum": sorted(SERVICES)},
        "additionalProperties": {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
    },
    "arenaBytes": {"type": ["string", "integer"], "pattern": "^[0-9]+$"},
    "driveBytes": {"type": ["string", "integer"], "pattern": "^[0-9]+$"},
    "folder": {"type": "string", "pattern": "^/"},
    "gpus": {"type": "integer", "minimum": 0},
    "queue": {"type": "integer", "minimum": 1},
}
"""Values whose schema says more than their type."""
ELSEWHERE = (
    *("QUIRE_CLIENT_CA", "QUIRE_CLIENT_CERT", "QUIRE_CLIENT_KEY", "QUIRE_CLIENT_UIDS", "QUIRE_KEY_SECRET"),
    "QUIRE_LOCAL_PORTS",
    *("QUIRE_OBJECT_KEY", "QUIRE_OBJECT_SECRET", "QUIRE_OBJECT_URL"),
    *("QUIRE_TOKEN", "QUIRE_TRACE_FOLDER"),
)
"""Read by clients, the command line, telemetry and the manifests."""
MADE_OF_ALERTS = "# Made of observability/alerts.yaml by `make generated`; do not edit.\n"


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


def groups() -> str:
    """The alerts without their head, as the chart includes them."""
    return "groups:\n" + ALERTS.read_text().partition("groups:\n")[2]


def schema() -> str:
    """Return the schema of values.yaml: names and types. Roles may have the values of `pods`."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for service in SERVICES:
        values[service] |= values["pods"]
    made = {"$schema": "http://json-schema.org/draft-07/schema#", **_type(values)}
    return json.dumps(made, indent=2) + "\n"


def _type(value: object, name: str = "") -> dict[str, object]:
    if name in CLOSER:
        return CLOSER[name]
    match value:
        case dict():
            parts = {each: _type(part, each) for each, part in value.items()}
            whole = {} if name in FREE else {"properties": parts, "additionalProperties": False}
            return {"type": "object", **whole}
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case list():
            return {"type": "array"}
        case _:
            return {"type": "string"}


def main() -> None:
    wanted = {
        VARIABLES: names(),
        CHART / "alerts.yaml": MADE_OF_ALERTS + groups(),
        CHART / "values.schema.json": schema(),
        **sync_client.texts(),
    }
    for file, text in wanted.items():
        if "--check" not in sys.argv[1:]:
            file.write_text(text)
        elif file.read_text() != text:
            sys.exit(f"{file.name} is not what it is made from; run `make generated`")


if __name__ == "__main__":
    main()
