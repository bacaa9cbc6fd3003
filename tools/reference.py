"""The reference pages of the documentation, each made from what it describes: the command line, the configuration
classes, the metrics, the errors and the protos.

python tools/reference.py            write them
python tools/reference.py --check    status 1 if one says something else
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer
from google.protobuf import descriptor_pb2
from grpc_tools import protoc  # type: ignore[import-untyped, unused-ignore]

from quire.model import errors
from quire.telemetry import names
from quire.wire.status import status_of
from quire_server.config import variable_name

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools import interfaces, openapi, residency  # noqa: E402

PAGES: Final = ROOT / "docs" / "reference"
SERVICES: Final = ("orchestrator", "gateway", "storage", "scheduler", "decoder")
_MADE: Final = "<!-- Made by tools/reference.py (`make generated`); do not edit. -->\n\n"
_MAKERS: Final = {
    "counter": "counter",
    "tally": "counter",
    "create_counter": "counter",
    "create_histogram": "histogram",
    "create_observable_gauge": "gauge",
}
_UNITS: Final = {"s": "seconds", "By": "bytes", "By/s": "bytes_per_second", "1": "", "": ""}

_CONFIGURATION: Final = """\
Services are configured by environment variables. `quire-<service> --check` lists everything that is wrong with them. A
variable that no service knows is refused, with the nearest name."""
_COMMANDS: Final = """\
The extra `tools` of Quire brings `quire`, a cluster on one machine, the demo and the benchmarks; `cli` brings `quire`
for a cluster that runs. Every command has `--help`; `quire --install-completion` adds completion to the shell.

| status | meaning |
| --- | --- |
| 0 | done |
| 1 | it failed; one line on stderr says why |
| 2 | the command line, or a configuration, is wrong |"""
_METRICS: Final = """\
At `/metrics` of each service, where `QUIRE_<SERVICE>_METRICS_LISTEN` is set. `target_info` has the node's name. Of more
than 64 values of a label the largest are told apart, the rest is `others`. What alerts count is 0 from the start."""
_ERRORS: Final = """\
The same class at the server and at the client (`quire.model.errors`). `field` names the input that was wrong;
`retry_after_s`, where it is not 0, says when trying again makes sense. HTTP answers carry the same name as problem
details (RFC 9457)."""


def configuration() -> str:
    """Variables by service; those that several have come once."""
    rows: dict[str, list[str]] = {}
    for service in SERVICES:
        module = importlib.import_module(f"quire_{service}.config")
        for field in dataclasses.fields(getattr(module, f"{service.capitalize()}Config")):
            name = variable_name(module.PREFIX, field)
            default = "must be set" if field.metadata.get("required") else f"`{field.default}`" * (field.default != "")
            rows.setdefault(f"| `{name}` | {default} | {_cell(field.metadata['doc'])} |", []).append(service)
    text = f"# Configuration\n\n{_CONFIGURATION}\n"
    for title, where in [("Several services", None), *((each.capitalize(), [each]) for each in SERVICES)]:
        lines = [row for row, services in rows.items() if (len(services) > 1 if where is None else services == where)]
        text += f"\n## {title}\n\n| variable | default | meaning |\n| --- | --- | --- |\n" + "\n".join(lines) + "\n"
    return text


def commands() -> str:
    """Every command of `quire`, with its arguments and options."""
    from quire_tools.cli.app import app
    from quire_tools.cli.bench_app import GROUPS, load_commands

    for group in GROUPS:
        load_commands(group)
    text = f"# Command line\n\n{_COMMANDS}\n"
    for path, command in _walk(typer.main.get_command(app), ("quire",)):
        text += f"\n## `{' '.join(path)}`\n\n{_help(command.help)}\n"
        rows = [_parameter(each) for each in command.params if each.name != "help" and not each.hidden]
        if rows:
            text += "\n| | default | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    return text


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Of commands below it, and of itself where it does something."""
    for name, each in getattr(command, "commands", {}).items():
        yield from _walk(each, (*path, name))
    if not hasattr(command, "commands") or command.invoke_without_command:
        yield path, command


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"| `{parameter.name.upper()}` | | {_cell(parameter.help or '')} |"
    name = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
    default = "" if parameter.default in (None, "", ()) or callable(parameter.default) else f"`{parameter.default}`"
    return f"| {name} | {'must be given' if parameter.required else default} | {_cell(parameter.help or '')} |"


def metrics() -> str:
    """Every instrument: those of nodes' stats by their table, the others by the call that makes them."""
    rows = {}
    for each in names.STATS:
        kind = "counter" if each.counts else "gauge"
        rows[_exported(each.metric, each.unit, kind)] = (kind, each.label and f"`{each.label}`", each.doc)
    for file in sorted([*ROOT.glob("libs/quire*/**/*.py"), *ROOT.glob("services/**/*.py")]):
        for name, unit, doc, kind in _instruments(file.read_text()):
            rows[_exported(name, unit, kind)] = (kind, "", doc)
    lines = [f"| `{name}` | {kind} | {label} | {_cell(doc)} |" for name, (kind, label, doc) in sorted(rows.items())]
    head = "| metric | kind | label | meaning |\n| --- | --- | --- | --- |\n"
    return f"# Metrics\n\n{_METRICS}\n\n{head}" + "\n".join(lines) + "\n"


def _instruments(source: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, unit, description and kind of each that a module makes."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        kind = _MAKERS.get(node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
        first = node.args[0]
        of_names = isinstance(first, ast.Attribute) and isinstance(first.value, ast.Name) and first.value.id == "names"
        if kind is None or not of_names:
            continue
        assert isinstance(first, ast.Attribute)
        texts = [each.value for each in node.args[1:] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        unit, doc = [*texts, "", ""][:2]
        yield getattr(names, first.attr), unit, doc, kind


def _exported(name: str, unit: str, kind: str) -> str:
    """As Prometheus shows it."""
    parts = [name.replace(".", "_"), _UNITS[unit], "total" if kind == "counter" else ""]
    return "_".join(each for each in parts if each)


def error_classes() -> str:
    """The tree, and what each becomes in gRPC."""
    tree = (errors.__doc__ or "").partition("\n\n")[2].rstrip()
    kinds = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, errors.QuireError)]
    order = inspect.getsource(errors)
    kinds.sort(key=lambda kind: order.index(f"class {kind.__name__}("))
    rows = [f"| `{kind.__name__}` | `{status_of(kind('')).name}` | {_cell(kind.__doc__ or '')} |" for kind in kinds[1:]]
    head = "| error | gRPC status | meaning |\n| --- | --- | --- |\n"
    return f"# Errors\n\n{_ERRORS}\n\n```text\n{tree}\n```\n\n{head}" + "\n".join(rows) + "\n"


def grpc_services() -> str:
    """Every service and method, with the comments of the protos."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "all.bin"
        protos = sorted(str(file.relative_to(ROOT / "protos")) for file in (ROOT / "protos").glob("quire/v1/*.proto"))
        options = [f"-I{ROOT / 'protos'}", "--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *options, *protos]) != 0:
            raise SystemExit("protoc failed")
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    text = "# gRPC\n\nThe contracts are in `protos/quire/v1`. All services also answer health and reflection.\n"
    for file in files:
        said = {tuple(each.path): each.leading_comments.strip() for each in file.source_code_info.location}
        for number, service in enumerate(file.service):
            text += f"\n## `{file.package}.{service.name}`\n\n{_lines(said.get((6, number), ''))}\n\n"
            text += "| method | request | response | |\n| --- | --- | --- | --- |\n"
            for at, method in enumerate(service.method):
                asked, answered = (
                    f"{'stream ' * streams}`{kind.rpartition('.')[2]}`"
                    for kind, streams in (
                        (method.input_type, method.client_streaming),
                        (method.output_type, method.server_streaming),
                    )
                )
                text += f"| `{method.name}` | {asked} | {answered} | {_cell(said.get((6, number, 2, at), ''))} |\n"
    for file in files:
        said = {tuple(each.path): each.leading_comments.strip() for each in file.source_code_info.location}
        text += f"\n## Messages of `{file.name.removeprefix('quire/v1/')}`\n"
        for number, message in enumerate(file.message_type):
            text += _message(message, (4, number), said)
        for number, enum in enumerate(file.enum_type):
            text += f"\n### `{enum.name}`\n\n{_lines(said.get((5, number), ''))}\n\n| value | |\n| --- | --- |\n"
            for at, value in enumerate(enum.value):
                text += f"| `{value.name}` | {_cell(said.get((5, number, 2, at), ''))} |\n"
    return text


def _message(
    message: descriptor_pb2.DescriptorProto, path: tuple[int, ...], said: Mapping[tuple[int, ...], str]
) -> str:
    """A heading, what it is, and its fields; then the messages within it."""
    text = f"\n### `{message.name}`\n\n" + (f"{_lines(said[path])}\n\n" if said.get(path) else "")
    if message.field:
        text += "| field | type | |\n| --- | --- | --- |\n"
    for at, field in enumerate(message.field):
        kind = (
            field.type_name.rpartition(".")[2] or descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)[5:].lower()
        )
        many = "repeated " if field.label == field.LABEL_REPEATED else ""
        one_of = ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            one_of = f"One of `{message.oneof_decl[field.oneof_index].name}`. "
        text += f"| `{field.name}` | {many}`{kind}` | {one_of}{_cell(said.get((*path, 2, at), ''))} |\n"
    for at, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            text += _message(inner, (*path, 3, at), said)
    return text


def _cell(text: str) -> str:
    """On one line, as a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _lines(text: str) -> str:
    return " ".join(text.split())


def _help(text: str | None) -> str:
    """A command's help, its first line as a sentence."""
    return inspect.cleandoc(text or "").replace("<", "&lt;")


def pages() -> dict[Path, str]:
    made: dict[str, Callable[[], str]] = {
        "configuration.md": configuration,
        "cli.md": commands,
        "metrics.md": metrics,
        "errors.md": error_classes,
        "grpc.md": grpc_services,
        "http.md": interfaces.http,
        "openapi.json": openapi.document,
        "../../services/gateway/quire_gateway/http/openapi.json": openapi.document,
        "s3.md": interfaces.s3,
        "python.md": interfaces.python,
        "../design/residency.md": residency.page,
        "../design/figures/residency.svg": residency.figure,
    }
    return {(PAGES / name).resolve(): ("" if name.endswith(".json") else _MADE) + make() for name, make in made.items()}


def main(arguments: Sequence[str]) -> None:
    for file, text in pages().items():
        if "--check" not in arguments:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.exit(f"{file.relative_to(ROOT)} is not what it is made from; run `make generated`")


if __name__ == "__main__":
    main(sys.argv[1:])
