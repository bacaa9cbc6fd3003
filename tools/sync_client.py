"""The blocking calls of `Client` and of its images, made from `AsyncClient` and `ImageClient`."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CLIENT: Final = Path(__file__).parents[1] / "libs" / "quire" / "client"
WRAPPED: Final = {"Delivery": "SyncDelivery", "Retrieval": "SyncRetrieval", "StoreSession": "SyncStoreSession"}
"""Results that have coroutines themselves, and their blocking forms."""


@dataclass(frozen=True)
class Made:
    """A module of blocking calls.

    Attributes:
        source: The module with the coroutine functions.
        asynchronous: Their class.
        made: The module that is made.
        own: What its subclass does in its own way.
        head: What stands before the methods; `{imports}` and `{wrapped}` are replaced.
        run: The call of a coroutine; `{call}` is replaced.
        loop: What a blocking form of a result is given.
    """

    source: Path
    asynchronous: str
    made: Path
    own: frozenset[str]
    head: str
    run: str
    loop: str


CALLS: Final = Made(
    source=CLIENT / "client.py",
    asynchronous="AsyncClient",
    made=CLIENT / "blocking" / "calls.py",
    own=frozenset({"start", "close"}),
    head='''"""Calls of `Client`. Made of `AsyncClient` by `make generated`; do not edit."""

from __future__ import annotations

{imports}
from quire.client.blocking.loop import SyncLoop
from quire.client.blocking.transfers import {wrapped}


class SyncCalls(SyncLoop):
    """Methods as in `AsyncClient`, blocking; safe from any thread."""

''',
    run="self.run(self._client.{call})",
    loop="self",
)
IMAGES: Final = Made(
    source=CLIENT / "images.py",
    asynchronous="ImageClient",
    made=CLIENT / "blocking" / "image_calls.py",
    own=frozenset({"list"}),
    head='''"""Calls of `Client.images`. Made of `ImageClient` by `make generated`; do not edit."""

from __future__ import annotations

{imports}
from quire.client.blocking.loop import SyncLoop
from quire.client.images import EncodedImage, Image, ImageClient


class ImageCalls:
    """Methods as in `ImageClient`, blocking; safe from any thread."""

    def __init__(self, loop: SyncLoop, images: ImageClient) -> None:
        self._loop = loop
        self._images = images

''',
    run="self._loop.run(self._images.{call})",
    loop="self._loop",
)


def texts() -> dict[Path, str]:
    """Return each module's text."""
    return {each.made: _text(each) for each in (CALLS, IMAGES)}


def _text(made: Made) -> str:
    tree = ast.parse(made.source.read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == made.asynchronous)
    calls = [
        node
        for node in found.body
        if isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_") and node.name not in made.own
    ]
    methods = "\n\n".join(_method(call, made) for call in calls)
    wrapped = ", ".join(sorted(WRAPPED.values()))
    return _formatted(made.head.format(imports=_imports(tree, calls), wrapped=wrapped) + methods + "\n", made.made)


def _method(call: ast.AsyncFunctionDef, made: Made) -> str:
    """Return a method with the signature and the docstring of a coroutine function."""
    assert call.returns is not None, "public methods have types"
    arguments = [argument.arg for argument in call.args.args[1:]]
    arguments += [f"{argument.arg}={argument.arg}" for argument in call.args.kwonlyargs]
    returned = ast.unparse(call.returns)
    result = made.run.format(call=f"{call.name}({', '.join(arguments)})")
    if kind := WRAPPED.get(returned):
        result = f"{kind}({made.loop}, {result})"
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


def _formatted(code: str, made: Path) -> str:
    """Sort imports and format, as the project's own code."""
    for command in (["check", "--select", "I", "--fix", "-q"], ["format", "-q"]):
        done = subprocess.run(
            [Path(sys.executable).with_name("ruff"), *command, "--stdin-filename", str(made), "-"],
            input=code, capture_output=True, text=True, check=True,
        )  # fmt: skip
        code = done.stdout
    return code
