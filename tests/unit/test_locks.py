"""What the images install is what constraints.txt pins, each with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {
    "services": ("cli", "latents"),
    "decoder": ("cli", "latents", "decoder", "provenance"),
    "decoder-cuda": ("cli", "latents", "decoder", "provenance"),
}
_PIN = re.compile(r"^([\w.-]+)==([\w.]+)(?:\+cpu)?(?: ;[^\\]*)?", re.MULTILINE)


def pins(file: str) -> dict[str, str]:
    """Reads a file of pip's requirements: package (normalised) and version."""
    text = (ROOT / file).read_text()
    return {re.sub(r"[._]", "-", name).lower(): version for name, version in _PIN.findall(text)}


def required(extra: str) -> set[str]:
    """Returns the packages that pyproject.toml names for an extra, and for the extras in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages: set[str] = set()
    for requirement in [*project["dependencies"], *project["optional-dependencies"].get(extra, ())]:
        name, _, inner = re.match(r"([\w.-]+)(\[([\w,]+)\])?", requirement).groups()  # type: ignore[union-attr]
        if name == "quire":
            packages.update(*(required(part) for part in inner.split(",")))
        else:
            packages.add(name.lower())
    return packages


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_all_that_an_image_needs(name: str) -> None:
    locked = pins(f"locks/{name}.txt")
    assert set().union(*(required(extra) for extra in EXTRAS[name])) <= locked.keys(), "make locks"


@pytest.mark.parametrize("name", ["build", *EXTRAS])
def test_a_lock_is_what_the_tests_run_with(name: str) -> None:
    locked, tested = pins(f"locks/{name}.txt"), pins("constraints.txt")
    assert {package: version for package, version in locked.items() if tested.get(package, version) != version} == {}


@pytest.mark.parametrize("name", ["build", *EXTRAS])
def test_each_package_has_hashes(name: str) -> None:
    entries = re.split(r"\n(?=\S)", (ROOT / f"locks/{name}.txt").read_text().strip())
    packages = [entry for entry in entries if not entry.startswith("#")]
    assert packages and all("--hash=sha256:" in entry for entry in packages)


def test_images_install_with_hashes_only() -> None:
    commands = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    installs = [line for line in commands if line.startswith("RUN") and "pip install" in line]
    assert installs
    assert [line for line in installs if "--require-hashes" not in line and "--no-deps /wheels/" not in line] == []
