"""The contracts between services say what each field means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc  # type: ignore[import-untyped]

PROTOS = Path(__file__).resolve().parents[2] / "protos"
_FILE_MESSAGE, _MESSAGE_FIELD, _MESSAGE_ONEOF, _MESSAGE_NESTED = 4, 2, 8, 3


def _messages(messages: Any, path: tuple[int, ...], number: int) -> Iterator[tuple[Any, tuple[int, ...]]]:
    for index, message in enumerate(messages):
        here = (*path, number, index)
        yield message, here
        yield from _messages(message.nested_type, here, _MESSAGE_NESTED)


def test_every_field_is_commented(tmp_path: Path) -> None:
    """In every message of every file; `buf lint` says the same (buf.yaml), where there is a buf."""
    out = tmp_path / "all.binpb"
    sources = sorted(str(path) for path in PROTOS.glob("quire/v1/*.proto"))
    arguments = ["protoc", f"-I{PROTOS}", "--include_source_info", f"--descriptor_set_out={out}", *sources]
    assert protoc.main(arguments) == 0
    bare, fields = [], 0
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        commented = {tuple(each.path) for each in file.source_code_info.location if each.leading_comments.strip()}
        for message, path in _messages(file.message_type, (), _FILE_MESSAGE):
            if message.options.map_entry:
                continue
            named = [(each.name, (*path, _MESSAGE_FIELD, at)) for at, each in enumerate(message.field)]
            oneofs = enumerate(message.oneof_decl)  # those of optional fields are not written down
            named += [(each.name, (*path, _MESSAGE_ONEOF, at)) for at, each in oneofs if each.name[0] != "_"]
            bare += [f"{file.name}: {message.name}.{name}" for name, where in named if where not in commented]
            fields += len(named)
    assert fields > 300
    assert not bare, bare
