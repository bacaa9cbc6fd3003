"""Generate libs/quire/wire/v1 from the .proto files; with --check, fail if what is committed differs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
TARGET = ROOT.parent / "libs" / "quire" / "wire" / "v1"


def generate(folder: Path) -> None:
    """Write the modules of every .proto below `folder`, as quire/v1/*_pb2.py and so on."""
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("quire/v1/*.proto"))
    grpc_plugin = shutil.which("protoc-gen-mypy_grpc", path=str(Path(sys.executable).parent))
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"--python_out={folder}",
        f"--grpc_python_out={folder}",
        f"--pyi_out={folder}",
        f"--plugin=protoc-gen-mypy_grpc={grpc_plugin}",
        f"--mypy_grpc_out=quiet:{folder}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for path in (folder / "quire/v1").iterdir():  # protoc names modules by the package of the messages
        path.write_text(path.read_text().replace("from quire.v1 import", "from quire.wire.v1 import"))
    (folder / "quire/v1/__init__.py").write_text('"""Generated from protos/quire/v1 by `make proto`."""\n')


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder)
        made = folder / "quire/v1"
        if "--check" not in sys.argv:
            shutil.rmtree(TARGET, ignore_errors=True)
            shutil.copytree(made, TARGET)
            return
        fresh = {path.name: path.read_bytes() for path in made.iterdir()}
        kept = {path.name: path.read_bytes() for path in TARGET.iterdir() if path.is_file()}
        stale = sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))
        if stale:
            raise SystemExit(f"generated code differs from protos/: {', '.join(stale)}; run `make proto`")


if __name__ == "__main__":
    main()
