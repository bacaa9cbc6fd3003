"""The blocking calls of `Client`, made from `AsyncClient`: each runs the coroutine on the client's loop."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final

CLIENT: Final = Path(__file__).parents[1] / "libs" / "quire" / "client"
SOURCE, MADE = CLIENT / "client.py", CLIENT / "blocking" / "calls.py"
WRAPPED: Final = {"Delivery": "SyncDelivery", "Retrieval": "SyncRetrieval", "StoreSession": "SyncStoreSession"}
"""Results that have coroutines themselves, and their blocking forms."""
OWN: Final = frozenset({"start", "close"})
"""What `Client` does in its own way."""
HEAD: Final = '''"""Calls of `Client`. Made of `AsyncClient` by `make generated`; do not edit."""

from __future__ import annotations

{imports}
from quire.client.blocking.loop import SyncLoop
from quire.client.blocking.transfers import {wrapped}


class SyncCalls(SyncLoop):
    """Methods as in `AsyncClient`, blocking; safe from any thread."""

'''


def text() -> str:
    """Return the module's text."""
    tree = ast.parse(SOURCE.read_text())
    client = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AsyncClient")
    calls = [
        node
        for node in client.body
        if isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_") and node.name not in OWN
    ]
    methods = "\n\n".join(_method(call) for call in calls)
    wrapped = ", ".join(sorted(WRAPPED.values()))
    return _formatted(HEAD.format(imports=_imports(tree, calls), wrapped=wrapped) + methods + "\n")


def _method(call: ast.AsyncFunctionDef) -> str:
    """Return a method with the signature and the docstring of a coroutine function."""
    assert call.returns is not None, "public methods have types"
    arguments = [argument.arg for argument in call.args.args[1:]]
    arguments += [f"{argument.arg}={argument.arg}" for argument in call.args.kwonlyargs]
    returned = ast.unparse(call.returns)
    result = f"self.run(self._client.{call.name}({', '.join(arguments)}))"
    if kind := WRAPPED.get(returned):
        result = f"{kind}(self, {result})"
    statement = result if returned == "None" else f"return {result}"
    return (
        f"    def {call.name}({ast.unparse(call.args)}) -> {WRAPPED.get(returned, returned)}:\n"
        f'        """{ast.get_docstring(call, clean=False)}"""\n'
        f"        {statement}\n"
    )


def _imports(tree: ast.Module, calls: list[ast.AsyncFunctionDef]) -> str:
    """Return the imports of names that the signatures have."""
    taken = {name for call in calls for name in _names(call.args)}
    names = taken | {name for call in calls if call.returns for name in _names(call.returns)} - WRAPPED.keys()
    lines = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            used = [alias for alias in node.names if (alias.asname or alias.name) in names]
            if used and isinstance(node, ast.ImportFrom):
                lines.append(ast.unparse(ast.ImportFrom(node.module, used, 0)))
            elif used:
                lines.append(ast.unparse(ast.Import(used)))
    return "\n".join(lines)


def _names(part: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}


def _formatted(code: str) -> str:
    """Sort imports and format, as the project's own code."""
    for command in (["check", "--select", "I", "--fix", "-q"], ["format", "-q"]):
        done = subprocess.run(
            [Path(sys.executable).with_name("ruff"), *command, "--stdin-filename", str(MADE), "-"],
            input=code, capture_output=True, text=True, check=True,
        )  # fmt: skip
        code = done.stdout
    return code
