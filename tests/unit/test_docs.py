"""The documentation: links lead somewhere, code is code, commands and tests that it names are there."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from quire.model import assignment, images, keys, layout, records
from quire_gateway.s3.buckets import _BUCKETS_MAX
from quire_gateway.s3.call import BODY_BYTES_MAX
from quire_tools.cli.app import app
from quire_tools.cli.bench_app import GROUPS, load_commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*.md")), ROOT / "tests/simulation/README.md"]
README_LINES_MAX = 100
for _group in GROUPS:
    load_commands(_group)
COMMANDS: Any = typer.main.get_command(app)


def _blocks(text: str, language: str) -> Iterator[str]:
    """Fenced blocks of a language."""
    for block in re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield textwrap.dedent(block)


def _anchor(heading: str) -> str:
    """As GitHub and the site make it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links to files or headings that are not there."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)):
        if "://" in link:
            continue
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if heading and target.exists() else []
        if not target.exists() or (heading and heading not in map(_anchor, headings)):
            broken.append(link)
    return broken


def unknown_commands(text: str) -> list[str]:
    """Lines of shell blocks that name a command or an option which `quire` has not."""
    lines = [line.strip() for block in _blocks(text, "sh") for line in block.splitlines()]
    return [line for line in lines if not all(_is_known(words.split()) for words in _calls(line))]


def _calls(line: str) -> list[str]:
    """What follows `quire` in each call of it on a line of a shell."""
    found: list[str] = re.findall(r"(?:^|[;&|] |^[A-Z_]+=\S+ |bin/)quire ([^;&|]*)", line.partition(" #")[0])
    return found


def _is_known(words: list[str]) -> bool:
    command = COMMANDS
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if getattr(command, "commands", None) and words and not words[0].startswith("-"):
        return False
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    return all(word.partition("=")[0] in options for word in words if word.startswith("--"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_holds(page: Path) -> None:
    text = page.read_text()
    assert not broken_links(page, text)
    assert not unknown_commands(text)
    opened = re.findall(r"^ *```(.*)$", text, re.MULTILINE)[::2]
    assert all(opened), "a block without a language is not highlighted"
    for block in _blocks(text, "python"):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for test in re.findall(r"`((?:tests|libs)/[\w/]+\.py)(?:::([\w:]+))?`", text):
        assert (ROOT / test[0]).exists(), test
        name = test[1].rpartition(":")[2]
        assert not name or f"def {name}(" in (ROOT / test[0]).read_text(), test


def test_what_does_not_hold_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n")
    assert broken_links(page, "[a](nowhere.md) [b](page.md#a-heading) [c](page.md#another)") == [
        "nowhere.md",
        "page.md#another",
    ]
    shell = "```sh\nquire up --storage-nodes 2\nquire fly\nquire bench pool --wings 2\nX=1 quire status\n```\n"
    assert unknown_commands(shell) == ["quire fly", "quire bench pool --wings 2"]


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    files = re.findall(r"[\w/-]+\.md", text.partition("\nnav:")[2])
    assert sorted(files) == sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))


def test_the_front_page_is_short_and_its_figures_are_those_of_the_evaluation() -> None:
    readme, evaluation = (ROOT / "README.md").read_text(), (ROOT / "docs/evaluation.md").read_text()
    assert len(readme.splitlines()) <= README_LINES_MAX
    rows = re.findall(r"(?m)^\| .* \| \**([\d.]+)\** \| \**([\d.]+)\** \|$", readme)
    figures = [figure for row in rows for figure in row]
    assert len(figures) > 10
    missing = [each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?![\d.]\d)", evaluation)]
    assert not missing


def test_the_limits_of_the_support_page_are_those_of_the_code() -> None:
    limits = [
        *(keys.KEYS_MAX, records.UNCHAINED_MAX, layout._LAYERS_MAX, layout._TOKENS_MAX, layout.SLICE_BYTES_MAX),
        *(images.RECORD_BYTES_MAX, images.PIXELS_MAX, assignment.ENGINES_MAX, _BUCKETS_MAX, BODY_BYTES_MAX),
    ]
    table = (ROOT / "docs/support.md").read_text().partition("\n## Limits")[2].partition("\n\nSizes")[0]
    assert [int(value.replace(",", "")) for value in re.findall(r"\| ([\d,]+) \|", table)] == limits


def test_the_versions_of_the_support_page_are_those_that_are_installed() -> None:
    page, names = (ROOT / "docs/support.md").read_text(), ("torch", "transformers", "diffusers")
    pins = dict(re.findall(r"(?m)^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text()))
    assert f"| {', '.join(names)} | {', '.join(pins[name] for name in names)} |" in page


def test_every_alert_is_in_the_runbook() -> None:
    groups = yaml.safe_load((ROOT / "observability/alerts.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    runbook = (ROOT / "docs/operations/runbook.md").read_text()
    assert alerts == set(re.findall(r"\*\*(Quire\w+)\*\*", runbook))


def test_every_row_of_what_vllm_is_served_names_a_test() -> None:
    """The table says what tests run; one that is renamed or removed leaves its row without a proof."""
    guide = (ROOT / "docs/guides/vllm.md").read_text()
    rows = re.findall(r"^\| .* \| `(test_\w+\.py)::(test_\w+)` \|$", guide, re.MULTILINE)
    table = guide.partition("## What it serves")[2].partition("\n\n##")[0]
    assert len(rows) == table.count("\n| ") - 2 > 10
    for file, name in rows:
        assert f"def {name}(" in (ROOT / "tests/engines" / file).read_text(), f"{file}::{name}"
