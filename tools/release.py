"""What a release consists of, made from a tag: a wheel of each library, the Helm chart, a bill of materials, checksums.

python tools/release.py TAG [FOLDER]    e.g. v0.3.0; into dist/ unless told otherwise

The version is the tag's. What is built is the tag's tree, with that version written into it, and nothing of the working
tree. The same tag, and address, give the same bytes: times in archives are those of the tag's commit.

QUIRE_REPOSITORY=https://github.com/OWNER/NAME names the repository. It goes into the wheels' metadata and makes the
links of the README absolute: a package index resolves no others.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {
    "pyucx": ("UCX from asyncio: puts, registered memory, streams", ["libs/pyucx"]),
    "quire": ("KV caches and latents kept as small immutable objects: the client, and connectors", ["libs/quire"]),
    "quire-server": (
        "The services of Quire",
        [
            "libs/quire_server",
            *(
                f"services/{name}/quire_{name}"
                for name in ("orchestrator", "gateway", "storage", "scheduler", "decoder")
            ),
        ],
    ),
    "quire-tools": ("Quire's command line, and a cluster on one machine", ["libs/quire_tools"]),
}
"""Wheels: what each is, and its packages."""
OF_PYUCX = ("cffi", "numpy")
MANIFESTS = ("trial", "quire")
SERVER_EXTRAS, TOOLS_EXTRAS = ("decoder", "provenance"), ("cli", "tools", "events")


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def export(tag: str, folder: Path) -> None:
    """The tag's tree."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", tag))) as archive:
        archive.extractall(folder, filter="data")


def stamp(folder: Path, version: str) -> None:
    """Write the version where the tree names one."""
    places = {
        "pyproject.toml": r'(?m)^(version = ")[^"]+(")$',
        "benchmarks/pyproject.toml": r'(?m)^(version = ")[^"]+(")$',
        "k8s/helm/quire/Chart.yaml": r"(?m)^((?:version|appVersion): ).+()$",
        **{f"k8s/manifests/{name}.yaml": r"(?m)^(\s+image: quire-[a-z-]+:)\S+()$" for name in MANIFESTS},
    }
    for name, pattern in places.items():
        file = folder / name
        text, count = re.subn(pattern, rf"\g<1>{version}\g<2>", file.read_text())
        if not count:
            sys.exit(f"{name} names no version")
        file.write_text(text)


def projects(whole: dict[str, Any], version: str) -> dict[str, dict[str, Any]]:
    """The `[project]` of each library, from that of the repository, which has all of them in one."""
    about = whole["project"]
    extras: dict[str, list[str]] = about["optional-dependencies"]
    common = {name: about[name] for name in ("license", "classifiers", "keywords", "requires-python")} | {
        "version": version
    }
    scripts: dict[str, str] = about["scripts"]

    def moved(requirements: Iterable[str]) -> list[str]:
        """`quire[extra]` of the repository, as the wheel that has it."""
        found = []
        for each in requirements:
            if not (within := re.fullmatch(r"quire\[(.+)\]", each)):
                found.append(each)
                continue
            for extra in within[1].split(","):
                if extra == "server":
                    found.append(f"quire-server=={version}")
                elif extra in SERVER_EXTRAS:
                    found.append(f"quire-server[{extra}]=={version}")
                elif extra in TOOLS_EXTRAS:
                    found.append(f"quire-tools[{extra}]=={version}")
                else:
                    found.append(f"quire[{extra}]=={version}")
        return found

    elsewhere = ("server", *SERVER_EXTRAS, *TOOLS_EXTRAS)
    of_client = {
        name: moved(each)
        for name, each in extras.items()
        if name not in (*elsewhere, "dev", "judge", "charts", "mutants")
    }
    of_client |= {name: moved([f"quire[{name}]"]) for name in elsewhere}
    own: dict[str, dict[str, Any]] = {
        "pyucx": {"dependencies": [each for each in about["dependencies"] if re.match(r"[\w-]+", each)[0] in OF_PYUCX]},  # type: ignore[index]
        "quire": {
            "dependencies": [*about["dependencies"], f"pyucx=={version}"],
            "optional-dependencies": of_client,
        },
        "quire-server": {
            "dependencies": [f"quire=={version}", *moved(extras["server"])],
            "optional-dependencies": {name: moved(extras[name]) for name in SERVER_EXTRAS},
            "scripts": {name: target for name, target in scripts.items() if name != "quire"},
        },
        "quire-tools": {
            "dependencies": [f"quire-server=={version}"],
            "optional-dependencies": {name: moved(extras[name]) for name in TOOLS_EXTRAS},
            "scripts": {"quire": scripts["quire"]},
            "entry-points": about["entry-points"],
        },
    }
    return {name: {"name": name, "description": LIBRARIES[name][0], **common, **own[name]} for name in LIBRARIES}


def toml(value: object) -> str:
    """A value of the kinds that a `[project]` has."""
    match value:
        case dict():
            return "{" + ", ".join(f"{toml(name)} = {toml(each)}" for name, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case _:
            return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a page with absolute links to the repository's files; a picture links to the raw file."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)

    def address(link: re.Match[str]) -> str:
        is_picture = re.search(r"!\[[^\[\]]*$", link.string[: link.start()])
        return f"]({repository}/{'raw' if is_picture else 'blob'}/{tag}/{link[1]}"

    for at in range(0, len(parts), 2):  # code is between them
        if unknown := re.search(r"(?m)^\[[^\]]+\]:\s.*|<(?:img|a|source)\s[^>]*>|\]\([</].*", parts[at]):
            sys.exit(f"a link of a form that is not known here: {unknown[0]}")
        parts[at] = re.sub(r"\]\((?!#|[A-Za-z][A-Za-z+.-]*:)([^)\s]+)", address, parts[at])
    return "".join(parts)


def build(tree: Path, out: Path, version: str, seconds: str) -> None:
    """The wheels."""
    whole = tomllib.loads((tree / "pyproject.toml").read_text())
    repository = os.environ.get("QUIRE_REPOSITORY", "").rstrip("/")
    if repository:
        readme = tree / "README.md"
        readme.write_text(absolute(readme.read_text(), repository, f"v{version}"))
    for name, project in projects(whole, version).items():
        project |= {"readme": "README.md", "license-files": ["LICENSE"]}
        if repository:
            project["urls"] = {"Repository": repository}
        text = '[build-system]\nrequires = ["hatchling>=1.27"]\nbuild-backend = "hatchling.build"\n\n[project]\n'
        text += "".join(f"{key} = {toml(value)}\n" for key, value in project.items())
        text += f"\n[tool.hatch.build.targets.wheel]\npackages = {toml(LIBRARIES[name][1])}\n"
        (tree / "pyproject.toml").write_text(text)
        _wheel(tree, out, seconds)
    benchmarks = tree / "benchmarks" / "pyproject.toml"
    benchmarks.write_text(benchmarks.read_text().replace('"quire[tools]"', f'"quire[tools]=={version}"'))
    _wheel(benchmarks.parent, out, seconds)


def _wheel(folder: Path, out: Path, seconds: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": seconds}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)


def chart(tree: Path, out: Path, version: str, seconds: str) -> None:
    """The Helm chart, as `helm package` would archive it."""
    with (out / f"quire-{version}.tgz").open("wb") as file:
        command = ["tar", "--sort=name", f"--mtime=@{seconds}", "--owner=0", "--group=0", "--numeric-owner"]
        archive = subprocess.run(
            [*command, "-C", str(tree / "k8s" / "helm"), "-cf", "-", "quire"], check=True, capture_output=True
        ).stdout
        file.write(subprocess.run(["gzip", "-n"], input=archive, check=True, capture_output=True).stdout)


def bill(tree: Path, out: Path, version: str) -> None:
    """All distributions that the images and the two commands of the README install, as CycloneDX."""
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible", "constraints.txt"]
    made = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"{made.stderr}\nthe bill of materials wants: pip install cyclonedx-bom")
    (out / f"quire-{version}.cdx.json").write_text(made.stdout)


def release(tag: str, out: Path) -> None:
    """Make a release of a tag in a folder."""
    if not (named := re.fullmatch(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)", tag)):
        sys.exit(f"{tag} is no version: tags of releases are like v0.3.0")
    version, seconds = named[1], git("log", "-1", "--format=%ct", tag).decode().strip()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        export(tag, tree)
        stamp(tree, version)
        chart(tree, out, version, seconds)
        bill(tree, out, version)
        for name in MANIFESTS:
            shutil.copy(tree / "k8s" / "manifests" / f"{name}.yaml", out / f"{name}-{version}.yaml")
        build(tree, out, version, seconds)
    files = sorted(file for file in out.iterdir() if version in file.name)
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (out / "SHA256SUMS").write_text(sums)
    print(sums, end="")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    release(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "dist").resolve())
