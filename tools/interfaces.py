"""Reference pages of what programs talk to: HTTP, S3 and the Python API, each from the code that answers."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Final

import quire.client
from quire_gateway.core.s3_errors import STATUS
from quire_gateway.core.s3_operations import COPIES, OF_ANY_REQUEST, ONLY, OPERATIONS
from quire_gateway.http.frontend import ImagesFrontend
from quire_gateway.http.latent_puts import OF_A_PUT
from quire_gateway.s3 import frontend as s3_frontend
from quire_gateway.s3.frontend import S3Frontend
from quire_gateway.s3.rdma import RdmaRequests

_PATHS: Final = {"service": "/", "bucket": "/BUCKET", "object": "/BUCKET/KEY"}
_VALUES: Final = {
    "quire.model.hashing": ("Namespace", "block_keys"),
    "quire.model.layout": ("KvLayout", "Dtype"),
    "quire.model.durability": ("Durability", "OnExisting"),
}
_INTEGRATIONS: Final = {
    "quire.integrations.transformers": ("PrefixCache", "Prefill"),
    "quire.integrations.diffusers": ("LatentKeeper",),
}

_HTTP: Final = """\
# HTTP

Images, at `QUIRE_GATEWAY_HTTP_LISTEN` and `QUIRE_GATEWAY_HTTP_TLS_LISTEN`. [Images as latents](../guides/images.md)
shows how they are used. Errors are problem details (RFC 9457) with a request id; [errors](errors.md) lists them with
their status. With tokens (`QUIRE_GATEWAY_AUTH`) a request has `Authorization: Bearer NAME:SECRET`, or is a signed URL.
[openapi.json](openapi.json) is the same for programs (OpenAPI 3.1).

| request | |
| --- | --- |
{routes}

A PUT's query may have: {parameters}. A GET's are in [the guide](../guides/images.md#get). Headers of a PUT:
`Content-Type` (`application/octet-stream` with `shape`: raw values; a picture's type: a picture; else safetensors, a
latent record, or a picture by its first bytes), `X-Quire-Meta-NAME`, `X-Quire-Provenance`, `If-Match`, `If-None-Match`.
"""
_S3: Final = """\
# S3

What the S3 frontend answers, at `QUIRE_GATEWAY_S3_LISTEN` and `QUIRE_GATEWAY_S3_TLS_LISTEN`. Everything else is
answered with `NotImplemented` (501), other parameters and other `x-amz-` headers of these requests too: nothing that
could change what a request means is ignored. [S3](../guides/s3.md) shows how it is used.

| request | operation | parameters | `x-amz-` headers |
| --- | --- | --- | --- |
{operations}

Any request may have `x-id` and, as headers or in a signed URL, {anywhere}. A header that ends with a hyphen here stands
for all that begin so. Of these no other values are taken: {only}.

With a header, bytes go by UCX to and from the client's memory:

| request | header | operation |
| --- | --- | --- |
{by_rdma}

## Error codes

{codes}
"""
_PYTHON: Final = """\
# Python API

The names that `quire.client` and the integrations export. All raise the errors of `quire.model.errors`
([errors](errors.md)).
"""


def http_routes() -> Iterator[tuple[str, str, str]]:
    """Yield method, path and name of the handler of each route for images."""
    for call in _calls(ImagesFrontend.start):
        if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("add_") and len(call.args) == 2:
            path, handler = call.args
            if isinstance(path, ast.Constant) and isinstance(handler, ast.Attribute):
                method = call.func.attr.removeprefix("add_").upper()
                yield method, str(path.value).replace("{id:(?s:.+)}", "{id}"), handler.attr


def http() -> str:
    rows = [
        f"| `{method} {path}` | {_said(getattr(ImagesFrontend, handler))} |" for method, path, handler in http_routes()
    ]
    return _HTTP.format(routes="\n".join(rows), parameters=", ".join(f"`{name}`" for name in OF_A_PUT))


def s3() -> str:
    plain, by_rdma = [], []
    handlers: dict[str, Any] = {
        **s3_frontend.OF_BUCKETS,
        **s3_frontend.OF_SETTINGS,
        **s3_frontend.OF_OBJECTS,
    }
    for operation in (*OPERATIONS, *COPIES):
        request = f"{operation.method} {_PATHS[operation.level]}"
        request += f"?{operation.subresource}" if operation.subresource else ""
        request += "` with `x-amz-copy-source" if operation in COPIES else ""
        taken = _names(operation.parameters), _names(name.removeprefix("x-amz-") for name in operation.headers)
        plain.append(f"| `{request}` | {_said(handlers[operation.name])} | {taken[0]} | {taken[1]} |")
    for row in _tuples(S3Frontend.__init__):
        level, method, condition, handler = row.elts
        if isinstance(handler, ast.Attribute):
            request, summary = f"{_text(method)} {_PATHS[_text(level)]}", _said(getattr(RdmaRequests, handler.attr))
            by_rdma.append(f"| `{request}` | `{_constant(condition)}` | {summary} |")
    codes = ", ".join(f"`{code}` ({status})" for code, status in STATUS.items())
    only = ", ".join(f"`{name}: {' or '.join(sorted(values))}`" for name, values in ONLY.items())
    operations, transfers = "\n".join(plain), "\n".join(by_rdma)
    return _S3.format(operations=operations, by_rdma=transfers, codes=codes, anywhere=_names(OF_ANY_REQUEST), only=only)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def python() -> str:
    parts = [_PYTHON, "## `quire.client`", ""]
    for name in quire.client.__all__:
        parts += _class(getattr(quire.client, name))
    for module, names in (_VALUES | _INTEGRATIONS).items():
        parts += [f"## `{module}`", ""]
        for name in names:
            parts += _documented(getattr(importlib.import_module(module), name))
    return "\n".join(parts).rstrip() + "\n"


def _documented(thing: Any) -> list[str]:
    if inspect.isfunction(thing):
        return [f"### `{thing.__name__}`", "", *_code(thing.__name__, thing), *_docstring(thing), ""]
    if issubclass(thing, Enum):
        values = ", ".join(f"`{each.name}`" for each in thing)
        return [f"### `{thing.__name__}`", "", *_docstring(thing), "", f"Values: {values}.", ""]
    return _class(thing)


def _class(kind: Any) -> list[str]:
    """A heading, how it is made, what it says, and its public methods."""
    parts = [f"### `{kind.__name__}`", "", *_code(kind.__name__, kind.__init__), *_docstring(kind), ""]
    if kind.__init__.__doc__ and kind.__init__.__doc__ != object.__init__.__doc__:
        parts += [*_docstring(kind.__init__), ""]
    for name, member in vars(kind).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property | classmethod)):
            called = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if called.__doc__:
                waits = "await " if inspect.iscoroutinefunction(called) else ""
                shown = name if isinstance(member, property) else f"{waits}{name}{_signature(called)}"
                parts += [f"**`{shown}`**", "", *_docstring(called), ""]
    return parts


def _code(name: str, made: Any) -> list[str]:
    return ["```py", f"{name}{_signature(made)}", "```", ""] if inspect.isfunction(made) else []


def _signature(function: Any) -> str:
    """Without `self`, and names of types without their modules."""
    signature = inspect.signature(function)
    shown = [each for name, each in signature.parameters.items() if name not in ("self", "cls")]
    text = str(signature.replace(parameters=shown))
    text = text.removesuffix(" -> None").removesuffix(" -> 'None'")
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def _docstring(documented: Any) -> list[str]:
    return inspect.cleandoc(documented.__doc__ or "").replace("<", "&lt;").splitlines()


def _said(function: Any) -> str:
    """A docstring, as a table's cell."""
    return " ".join((function.__doc__ or "").split()).replace("|", "\\|").replace("<", "&lt;")


def _tree(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _calls(function: Callable[..., Any]) -> Iterator[ast.Call]:
    return (node for node in ast.walk(_tree(function)) if isinstance(node, ast.Call))


def _tuples(function: Callable[..., Any]) -> Iterator[ast.Tuple]:
    """Rows of the tables in its body."""
    return (node for node in ast.walk(_tree(function)) if isinstance(node, ast.Tuple) and len(node.elts) == 4)


def _text(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant), "a row says its request in words"
    return str(node.value)


def _constant(node: ast.expr) -> str:
    assert isinstance(node, ast.Name), "a header is a name of the frontend's module"
    return str(getattr(s3_frontend, node.id))
