"""`pip install quire` in an empty environment: what comes along, what is loaded, and what is said of what is missing.

The environment is made of links to the distributions that pip would install for the wheel's requirements, as they are
installed here: nothing is downloaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NOT_FOR_CLIENTS = {
    "aiohttp",
    "awscrt",
    "boto3",
    "cryptography",
    "defusedxml",
    "hiredis",
    "isal",
    "obstore",
    "opentelemetry-sdk",
    "prometheus-client",
    "redis",
    "torch",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return next(folder.glob("*.whl"))


class Environment:
    """A virtual environment with a wheel, its requirements for `extras`, and nothing else."""

    def __init__(self, folder: Path, wheel: Path, extras: set[str]) -> None:
        venv.create(folder, with_pip=False)
        self._python = folder / "bin" / "python"
        packages = next(folder.glob("lib/python*/site-packages"))
        zipfile.ZipFile(wheel).extractall(packages)
        mine = PathDistribution(next(packages.glob("quire-*.dist-info")))
        self.distributions = _closure(mine, extras)
        for name in self.distributions:
            for file in distribution(name).files or []:
                top = Path(file).parts[0]
                source = Path(str(distribution(name).locate_file(top)))
                if top not in ("..", "__pycache__") and not (packages / top).exists():
                    (packages / top).symlink_to(source)

    def run(self, code: str, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._python), "-I", "-c", code]
        env = {"PATH": "/usr/bin:/bin", **environment}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)


def _closure(start: Distribution, extras: set[str]) -> set[str]:
    """Names of all distributions that pip would install for one."""
    found: set[str] = set()
    pending: list[tuple[Distribution, frozenset[str]]] = [(start, frozenset(extras))]
    done: set[tuple[str, frozenset[str]]] = set()
    while pending:
        dist, wanted = pending.pop()
        for line in dist.requires or []:
            requirement = Requirement(line)
            marks = [
                requirement.marker is None or requirement.marker.evaluate({"extra": each}) for each in wanted or {""}
            ]
            if not any(marks):
                continue
            name, more = requirement.name.lower().replace("_", "-"), frozenset(requirement.extras)
            if (name, more) not in done:
                done.add((name, more))
                pending.append((start if name == "quire" else distribution(name), more))
                found |= {name} - {"quire"}
    return found


@pytest.fixture(scope="module")
def client_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("client"), wheel, set())


def test_a_client_installs_nothing_of_a_server(client_only: Environment) -> None:
    assert {"grpcio", "numpy", "protobuf", "blake3"} <= client_only.distributions
    assert not client_only.distributions & NOT_FOR_CLIENTS


def test_importing_changes_nothing_and_loads_little(client_only: Environment) -> None:
    """Everything below `quire.client`, `model`, `wire` and `transport`, without UCX on the machine."""
    code = """
import os, signal, sys, time, json
before = dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
started = time.perf_counter()
import quire.client
seconds = time.perf_counter() - started
assert before == (dict(os.environ), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
print(json.dumps({"seconds": seconds, "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""
    result = client_only.run(code)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    print(f"import quire.client: {said['seconds'] * 1e3:.0f} ms")
    loaded = set(said["modules"])
    assert not loaded & {"redis", "aiohttp", "obstore", "torch", "cryptography", "pyucx", "libucx", "typer"}, loaded
    assert "quire" in loaded and "quire_server" not in loaded


def test_the_contract_suites_need_pytest_alone(client_only: Environment) -> None:
    """For those who write an adapter elsewhere."""
    places = [str(distribution(name).locate_file("")) for name in ("pytest", "pytest-asyncio")]
    code = f"""
import sys
import quire.testing, quire.testing.buckets, quire.testing.index, quire.testing.objects, quire.testing.simulation
refused = {{"isal", "redis", "obstore", "aiohttp"}} & set(sys.modules)
assert not refused, refused
sys.path += {places}
import quire.testing.contracts
"""
    result = client_only.run(code)
    assert result.returncode == 0, result.stderr


def test_without_ucx_a_transport_says_what_to_install(client_only: Environment, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "libucp.so.0")
    result = client_only.run("from quire.transport import ucx_transport; ucx_transport()", PYUCX_LIBUCP=nowhere)
    *_, last = result.stderr.strip().splitlines()
    assert result.returncode == 1 and "ConfigInvalid" in last and "pip install libucx-cu12" in last


def _main(*words: str) -> str:
    return f"import sys; sys.argv = {['quire', *words]}; from quire_tools.cli import main; main()"


@pytest.fixture(scope="module")
def operator(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What is in each image, for the cluster that runs."""
    return Environment(tmp_path_factory.mktemp("cli"), wheel, {"cli"})


def test_the_command_line_says_what_it_needs(client_only: Environment, operator: Environment, tmp_path: Path) -> None:
    """Without its extra one line; with it, and without UCX and torch, it works."""
    result = client_only.run(_main("--help"))
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "the extra `tools` of Quire" in result.stderr
    assert "redis" in operator.distributions and "torch" not in operator.distributions
    result = operator.run(_main("--help"), PYUCX_LIBUCP=str(tmp_path / "libucp.so.0"))
    assert result.returncode == 0 and "bench" in result.stdout, result.stderr
    assert not [name for name in operator.distributions if name == "quire-bench"]


@pytest.mark.parametrize("words", [["bench", "--help"], ["plan", "--help"]])
def test_help_is_there_without_what_a_command_needs(operator: Environment, words: list[str]) -> None:
    result = operator.run(_main(*words))
    assert result.returncode == 0 and "Usage" in result.stdout, result.stderr
    assert words != ["bench", "--help"] or "quire-bench" in result.stdout


@pytest.mark.parametrize("words", [["bench"], ["bench", "delivery", "--help"]])
def test_without_its_distribution_bench_says_what_to_install(operator: Environment, words: list[str]) -> None:
    result = operator.run(_main(*words))
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert "pip install quire-bench" in result.stderr


@pytest.mark.parametrize("words", [["demo"]])
def test_what_needs_more_says_so_in_one_line(operator: Environment, words: list[str]) -> None:
    result = operator.run(_main(*words))
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert "is not installed; this needs the extra `tools` of Quire" in result.stderr


def test_what_is_no_code_comes_along(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"quire_gateway/page/index.html", "quire_gateway/page/page.js", "quire_gateway/page/page.css"} <= names
    assert any(name.endswith(".lua") for name in names) and any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_demo_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    """`pip install 'quire[tools]'`, then `quire demo`, in an empty directory."""
    environment = Environment(tmp_path / "environment", wheel, {"tools"})
    done = environment.run(_main("demo", "--folder", str(tmp_path / "demo")), 180, HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical to the KV kept in memory: yes" in done.stdout
