"""A release: wheels that pip can install each for itself, named by the tag, the same bytes each time."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://git.example/quire/quire"


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A release of this commit as 7.8.9, made twice, in a repository of its own."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git repository")
    folder = tmp_path_factory.mktemp("release")
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(clone)], check=True, timeout=60)
    shutil.copy(ROOT / "tools" / "release.py", clone / "tools" / "release.py")
    subprocess.run(["git", "tag", "v7.8.9"], cwd=clone, check=True)
    tool = _tool()
    tool.ROOT = clone
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_REPOSITORY", REPOSITORY)
        for out in ("one", "two"):
            tool.release("v7.8.9", folder / out)
    return folder / "one", folder / "two"


def _about(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


@pytest.mark.slow
def test_the_same_tag_is_the_same_bytes(released: tuple[Path, Path]) -> None:
    one, two = released
    names = sorted(file.name for file in one.iterdir())
    assert names == [
        "SHA256SUMS",
        *(f"{name}-7.8.9-py3-none-any.whl" for name in ("pyucx", "quire")),
        *("quire-7.8.9.cdx.json", "quire-7.8.9.tgz", "quire-7.8.9.yaml"),
        *(f"{name}-7.8.9-py3-none-any.whl" for name in ("quire_bench", "quire_server", "quire_tools")),
        "trial-7.8.9.yaml",
    ]
    assert (one / "SHA256SUMS").read_text() == (two / "SHA256SUMS").read_text()


@pytest.mark.slow
def test_each_wheel_has_its_packages_and_asks_for_the_others(released: tuple[Path, Path]) -> None:
    tops: dict[str, set[str]] = {}
    for wheel in released[0].glob("*.whl"):
        about = _about(wheel)
        assert (about["Version"], about["License-Expression"]) == ("7.8.9", "Apache-2.0")
        names = zipfile.ZipFile(wheel).namelist()
        tops[about["Name"]] = {each.split("/")[0] for each in names if ".dist-info" not in each}
        asked = [each for each in about.get_all("Requires-Dist") if each.startswith(("quire", "pyucx"))]
        assert all("==7.8.9" in each for each in asked), asked
        assert not any(each.startswith("quire[") and "dev" in each for each in asked)
    assert tops == {
        "pyucx": {"pyucx"},
        "quire": {"quire"},
        "quire-server": {
            "quire_server",
            *(f"quire_{name}" for name in ("decoder", "gateway", "orchestrator", "scheduler", "storage")),
        },
        "quire-tools": {"quire_tools"},
        "quire-bench": {"quire_bench"},
    }
    extras = set(_about(released[0] / "quire-7.8.9-py3-none-any.whl").get_all("Provides-Extra"))
    assert {"server", "decoder", "cli", "tools", "vllm", "ucx"} <= extras
    assert not extras & {"dev", "judge", "charts", "mutants"}
    with tarfile.open(released[0] / "quire-7.8.9.tgz") as chart:
        file = chart.extractfile("quire/Chart.yaml")
        assert file is not None and b"appVersion: 7.8.9" in file.read()


@pytest.mark.slow
def test_a_package_says_where_it_comes_from(released: tuple[Path, Path]) -> None:
    """A package index resolves only absolute links."""
    about = _about(released[0] / "quire-7.8.9-py3-none-any.whl")
    assert about.get_all("Project-URL") == [f"Repository, {REPOSITORY}"]
    links = re.findall(r"\]\(([^)]+)\)", about.get_payload())
    assert any(link == f"{REPOSITORY}/blob/v7.8.9/docs/tutorial.md" for link in links)
    assert all(link.startswith(("https://", "#")) for link in links), links


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/b.md#c)", "[a](https://x/blob/v1/docs/b.md#c)"),
        ("![a](docs/b.svg)", "![a](https://x/raw/v1/docs/b.svg)"),
        (
            "[a](#b) [c](https://d/e) [f](mailto:g) [h](HTTPS://i)",
            "[a](#b) [c](https://d/e) [f](mailto:g) [h](HTTPS://i)",
        ),
        ("[![a](b.svg)](c.md)", "[![a](https://x/raw/v1/b.svg)](https://x/blob/v1/c.md)"),
        ('[a [b] c](d.md "e")', '[a [b] c](https://x/blob/v1/d.md "e")'),
        ("`a[0](b)`\n```sh\nc[d](e)\n```\n[f](g)", "`a[0](b)`\n```sh\nc[d](e)\n```\n[f](https://x/blob/v1/g)"),
    ],
)
def test_links_of_a_package_are_addresses(text: str, expected: str) -> None:
    assert _tool().absolute(text, "https://x", "v1") == expected


@pytest.mark.parametrize(
    "text", ["[a]: docs/b.md", 'b <img src="docs/x.svg">', "[a](/docs/b.md)", "[a](<docs/b c.md>)"]
)
def test_a_link_of_another_form_ends_the_release(text: str) -> None:
    with pytest.raises(SystemExit, match="a form that is not known"):
        _tool().absolute(text, "https://x", "v1")


@pytest.mark.slow
def test_the_bill_of_materials_lists_what_is_pinned(released: tuple[Path, Path]) -> None:
    told = json.loads((released[0] / "quire-7.8.9.cdx.json").read_text())
    listed = {each["name"].lower().replace("_", "-"): each["version"] for each in told["components"]}
    pins = dict(re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text()))
    assert told["bomFormat"] == "CycloneDX" and listed.keys() >= {"grpcio", "numpy", "torch"}
    assert all(listed[name] == pins[name] for name in ("grpcio", "numpy", "torch"))


@pytest.mark.slow
def test_a_client_runs_from_its_two_wheels(released: tuple[Path, Path], tmp_path: Path) -> None:
    """`quire` and `pyucx` alone: the client is there, nothing of a server."""
    for name in ("quire", "pyucx"):
        zipfile.ZipFile(released[0] / f"{name}-7.8.9-py3-none-any.whl").extractall(tmp_path)
    code = f"""
import sys
sys.path[:] = [{str(tmp_path)!r}, *(path for path in sys.path if "libs" not in path and "services" not in path)]
import quire, quire.client, pyucx
assert quire.__version__ == "7.8.9" and quire.__file__.startswith({str(tmp_path)!r}), quire.__file__
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_tag_that_names_no_version_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"tags of releases are like v0\.3\.0"):
        _tool().release("latest", Path("nowhere"))
