"""What rots silently: import directions, sizes, lists that must agree. A ratchet in the way is changed in the open."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from quire.telemetry import names
from tests.unit.sources import ROOT, parsed, sources

SERVICES = ("orchestrator", "gateway", "storage", "decoder", "scheduler")
FUNCTION_LINES_MAX, MODULE_LINES_MAX = 70, 500
PART_LINES_MAX, CLASS_METHODS_MAX = 300, 25
"""Of the residency machine, whose events are a table of values."""
OURS = {"pyucx", "quire", "quire_server", "quire_tools", "quire_bench", *(f"quire_{name}" for name in SERVICES)}
CLIENT = {"blake3", "cbor2", "cffi", "google", "grpc", "numpy", "opentelemetry", "structlog", "uvloop"}
ALLOWED = {  # what modules may reach outside of this repository and the standard library
    "core": (r"quire_\w+\.core\..+", {"numpy", "isal"}),
    "model": (r"quire\.model\..+", {"numpy", "isal", "blake3", "cbor2"}),  # isal where a server is: zlib does as well
    "pyucx": (r"pyucx(\..+)?", {"cffi", "libucx", "numpy"}),
    "client": (r"quire|quire\.(client|transport|wire)(?!\.devices\.cuda)(\..+)?", CLIENT),
    "cuda": (r"quire\.transport\.devices\.cuda", CLIENT | {"torch"}),
    "testing": (r"quire\.testing(\.(?!simulation).+)?", CLIENT | {"isal", "pytest"}),
}
STANDARD_FORBIDDEN_IN_CORE = ("asyncio", "time", "socket", "os", "threading", "random", "subprocess")


def _sources() -> Iterator[Path]:
    return sources("libs", "services", "benchmarks")


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[2:] if parts[0] == "services" else parts[1:]
    return ".".join(part for part in parts if part != "__init__")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _loaded(path: Path) -> set[str]:
    """What a module imports when it is loaded: not what its functions import when they run, nor types alone."""
    found, pending = set[str](), list[ast.AST](parsed(path).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)
    return found


@functools.cache
def _all_imports() -> dict[str, set[str]]:
    return {_module(path): _imports(path) for path in _sources()}


@functools.cache
def _all_loaded() -> dict[str, set[str]]:
    paths = [*(ROOT / "libs").rglob("*.py"), *(ROOT / "services").rglob("*.py")]
    return {_module(path): _loaded(path) for path in paths}


def _tops(imports: set[str]) -> set[str]:
    return {name.split(".")[0] for name in imports}


def _reached(start: str) -> set[str]:
    """Everything outside of this repository that importing a module loads, by its top name."""
    loaded = _all_loaded()
    seen, pending, outside = set[str](), [start], set[str]()
    while pending:
        module = pending.pop()
        while module not in loaded and module:
            module = module.rpartition(".")[0]  # a name in a module
        if not module or module in seen:
            continue
        seen.add(module)
        parents = [module.rpartition(".")[0]] if "." in module else []
        for name in [*loaded[module], *parents]:
            if name.split(".")[0] in OURS:
                pending.append(name)
            else:
                outside.add(name.split(".")[0])
    return outside - sys.stdlib_module_names


def test_imports_point_one_way() -> None:
    """services → quire_server → quire → pyucx; quire_tools imports all of these, quire_bench everything."""
    below = {"pyucx": set[str](), "quire": {"pyucx"}, "quire_server": {"quire", "pyucx"}}
    below |= {"quire_tools": OURS - {"quire_bench"}, "quire_bench": OURS}
    for module, imports in _all_imports().items():
        top = module.split(".")[0]
        allowed = {top} | below.get(top, {"quire", "quire_server"})
        assert _tops(imports) & OURS <= allowed, f"{module} imports {(_tops(imports) & OURS) - allowed}"


def test_only_its_adapter_knows_pyucx() -> None:
    allowed = ("quire.transport.ucx", "quire_tools.cli.app", "quire_tools.cli.doctor")
    for module, imports in _all_imports().items():
        if "pyucx" in _tops(imports) and not module.startswith("pyucx"):
            assert module in allowed, f"{module} imports pyucx"


def test_only_its_adapters_see_redis() -> None:
    for module, imports in _all_imports().items():
        if "redis" in _tops(imports):
            others = {"quire_tools.local.cluster", "quire_bench.peers.stores", "quire_bench.index"}
            others.add("quire_bench.storage.redis_lost")
            assert module.startswith("quire_server.redis") or module in others, module


@pytest.mark.parametrize(("packages", "allowed"), ALLOWED.values(), ids=ALLOWED)
def test_what_an_import_loads(packages: str, allowed: set[str]) -> None:
    """Over everything that is imported on the way, and not only in the module's own lines."""
    assert "redis" in _reached("quire_orchestrator.server") and "aiohttp" in _reached("quire_gateway.server")
    for module in _all_loaded():
        if re.fullmatch(packages, module):
            assert _reached(module) <= allowed, f"{module} reaches {_reached(module) - allowed}"


def test_messages_stop_at_the_edge() -> None:
    """Only the edges see *_pb2: servers, gRPC adapters, the SDK, and what is named here."""
    allowed = (
        "quire.wire",
        "quire.client",
        "quire_server.grpc_server",
        "quire_server.membership.heartbeat",
        "quire_server.redis.membership",
        "quire_server.trace_service",
        "quire_tools.local.cluster",
        "quire_tools.otlp_sink",
        "quire_gateway.grpc",
    )
    for module, imports in _all_imports().items():
        if any("_pb2" in name for name in imports):
            is_edge = module.endswith(".server") or ".adapters." in module
            assert is_edge or module.startswith(allowed), f"{module} sees messages"


def test_core_decides_only() -> None:
    """core/ has no await, no clock, no network: neither by import nor by syntax."""
    for path in _sources():
        if "core" not in path.parts:
            continue
        module = _module(path)
        service = module.split(".")[0]
        tops = _tops(_all_imports()[module])
        assert not tops & set(STANDARD_FORBIDDEN_IN_CORE), module
        for name in _all_imports()[module]:
            if name.startswith(service):
                assert name.startswith((f"{service}.core", f"{service}.errors")), f"{module} imports {name}"
        assert not any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in ast.walk(parsed(path)))


def test_runtime_does_not_reach_outwards() -> None:
    """server, bench → runtime → core, ports; adapters → core, ports. Nothing imports a server, runtimes no adapter."""
    for module, imports in _all_imports().items():
        if not module.startswith("quire_"):
            continue
        service = module.split(".")[0]
        inner = not module.endswith(".server") and service != "quire_bench"
        for name in imports:
            if inner:
                assert name != f"{service}.server" and not name.startswith(f"{service}.server."), module
            if inner and ".adapters" not in module:
                assert not name.startswith(f"{service}.adapters"), f"{module} imports {name}"


def test_every_service_has_the_same_shape() -> None:
    for service in SERVICES:
        folder = ROOT / "services" / service / f"quire_{service}"
        assert (folder / "server.py").exists() and (folder / "config.py").exists() and (folder / "py.typed").exists()
        assert (ROOT / "docs" / "design" / f"{service}.md").exists(), f"{service} has no page"


def _undocumented(tree: ast.Module, documented: set[str], *, converts: bool) -> Iterator[tuple[int, str]]:
    """Line and name of public classes and functions without a docstring. A method may have it in a class of which it
    is one implementation: another one here that has it by that name, or a base. Properties and fields are as they
    are called.
    """
    pending: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    while pending:
        prefix, node = pending.pop()
        for each in node.body:
            if not isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or each.name[0] == "_":
                continue
            name = prefix + each.name
            if isinstance(each, ast.ClassDef):
                pending.append((f"{name}.", each))
            elif isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split("[")[0] for base in node.bases} - {"Protocol", "Generic"}
                is_property = any("property" in ast.unparse(each) for each in each.decorator_list)
                if bases or is_property or each.name in documented or each.name.startswith("test_"):
                    continue
            elif each.name == "main" or (converts and each.name.endswith(("_from", "_to"))):
                continue
            if not ast.get_docstring(each):
                yield each.lineno, name


def _methods_documented(trees: Iterable[ast.Module]) -> set[str]:
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = [
        each for node in classes for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {each.name for each in methods if ast.get_docstring(each)}


def test_what_is_public_is_documented() -> None:
    """Each public class and function has a docstring; a method has one, or a base, or another class here has it by that
    name.
    """
    trees = {path: parsed(path) for path in _sources()}
    documented = _methods_documented(trees.values())
    bare = [
        f"{path}:{line} {name}"
        for path, tree in trees.items()
        for line, name in _undocumented(tree, documented, converts="wire" in path.parts)
    ]
    assert not bare, "\n".join(bare)
    lacking = ast.parse(
        "class A:\n  'a'\n  def f(self): ...\n  def g(self): ...\ndef h(): ...\nclass B(A):\n  def f(self): ..."
    )
    assert [name for _, name in _undocumented(lacking, {"g"}, converts=False)] == ["h", "B", "A.f"]


def test_functions_and_modules_stay_small() -> None:
    long = []
    for path in [*_sources(), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text()
        part = path.parent.name == "residency" and path.name != "events.py"
        if len(text.splitlines()) > (PART_LINES_MAX if part else MODULE_LINES_MAX):
            long.append(f"{path}: {len(text.splitlines())} lines")
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_parts_of_the_residency_machine_stay_small() -> None:
    for path in (ROOT / "services/storage/quire_storage/core/residency").glob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
                assert len(methods) <= CLASS_METHODS_MAX, f"{path.name} {node.name}"


def test_parts_of_the_residency_machine_are_used_by_later_parts_only() -> None:
    """Their calls form a DAG: the package's docstring has the order."""
    order = [
        "copies",
        "departures",
        "memory",
        "pins",
        "promotions",
        "writes",
        "uploads",
        "stores",
        "evictions",
        "machine",
    ]
    prefix = "quire_storage.core.residency."
    for part in order:
        used = {
            name.removeprefix(prefix).split(".")[0] for name in _all_imports()[prefix + part] if name.startswith(prefix)
        }
        later = set(order[order.index(part) :]) & used
        assert not later, f"{part} uses {later}"


def test_telemetry_names_are_spelled_in_one_file() -> None:
    values = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    values |= {row.metric for row in names.STATS}
    dotted = {value for value in values if value.startswith("quire.")}
    assert len(dotted) >= 10
    for path in _sources():
        if path.name == "names.py":
            continue
        literals = {n.value for n in ast.walk(parsed(path)) if isinstance(n, ast.Constant)}
        assert not dotted & {value for value in literals if isinstance(value, str)}, path


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_pyproject_lists_agree(project: dict[str, object]) -> None:
    """Wheel packages, editable folders, mypy's path and the entry points name the same five services."""
    text = (ROOT / "pyproject.toml").read_text()
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]  # type: ignore[index]
    assert packages == [
        "libs/pyucx",
        "libs/quire",
        "libs/quire_server",
        "libs/quire_tools",
        *(f"services/{name}/quire_{name}" for name in ("orchestrator", "gateway", "storage", "scheduler", "decoder")),
    ]
    folders = project["tool"]["hatch"]["build"]["dev-mode-dirs"]  # type: ignore[index]
    assert folders == ["libs", *(str(Path(package).parent) for package in packages[4:])]
    assert project["tool"]["mypy"]["mypy_path"].split(":") == [folders[0], "benchmarks", *folders[1:]]  # type: ignore[index]
    for service in SERVICES:
        assert f'quire-{service} = "quire_{service}.server:main"' in text
        assert (ROOT / "services" / service / f"quire_{service}" / "__init__.py").exists()


def test_installed_versions_are_pinned(project: dict[str, object]) -> None:
    """Every direct dependency of the two commands has a line in constraints.txt; torch's is the agreed one."""
    pins = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    metadata = project["project"]
    assert isinstance(metadata, dict)
    wanted = list(metadata["dependencies"])
    for extra in metadata["optional-dependencies"].values():
        wanted += [name for name in extra if not name.startswith("quire[")]
    for requirement in wanted:
        name = requirement.split(">=")[0].split("[")[0].lower().replace("_", "-")
        assert name in pins, f"{name} is not pinned"
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()
