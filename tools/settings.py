"""The README's table of environment variables, made from the services' configuration classes.

python tools/settings.py            write it
python tools/settings.py --check    status 1 if the README says something else
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

from quire_server.config import variable_name

README = Path(__file__).parents[1] / "README.md"
SERVICES = ("gateway", "orchestrator", "storage", "decoder", "scheduler")
_ROW = "| `QUIRE_"


def rows() -> list[str]:
    """One line for each variable; those that services share come once, where they come first."""
    found: dict[str, None] = {}
    for service in SERVICES:
        module = importlib.import_module(f"quire_{service}.config")
        for field in dataclasses.fields(getattr(module, f"{service.capitalize()}Config")):
            default = f"`{field.default}` " if field.default != "" else ""
            found[f"| `{variable_name(module.PREFIX, field)}` | {default}| {field.metadata['doc']} |"] = None
    return list(found)


def with_table(text: str) -> str:
    """The README with the table as it should be."""
    lines = text.splitlines()
    old = [number for number, line in enumerate(lines) if line.startswith(_ROW)]
    return "\n".join([*lines[: old[0]], *rows(), *lines[old[-1] + 1 :]]) + "\n"


def main() -> None:
    text = README.read_text()
    wanted = with_table(text)
    if "--check" not in sys.argv[1:]:
        README.write_text(wanted)
    elif text != wanted:
        sys.exit("README.md: the table of variables is not that of the code; run `make settings`")


if __name__ == "__main__":
    main()
