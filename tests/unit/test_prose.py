"""Names and sentences that readers have to decode: a ratchet, whose numbers may only fall."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.unit.sources import ROOT, parsed, sources

LOCALS: Final = re.compile(
    "after|again|ahead|asked|away|before|begun|behind|both|brought|coming|drawn|due|each|everything|few|found|given|gone"
    "|heard|held|here|joined|kept|known|left|lent|lost|made|mine|missing|more|most|moved|near|none|nothing|now|one|other"
    "|others|said|seen|shown|some|there|those|told|two|until|waiting|wanted|what|who|whole"
)
"""Adverbs, pronouns and participles: a local is named by a noun of the domain."""
OPENINGS: Final = re.compile(
    r"(What|Those|Who|Where|Which|Whatever|Of|By|With|As|To|For|From|Without|Beside|Until|Among|Raises|It|They|None)\b"
)
"""A docstring begins with a noun that names the thing, or with the verb of what is done."""
MESSAGES: Final = re.compile(
    r"\bwhat (is|was|it|they|has|had)\b|\b(hears?|is told|are told|tells?|says so|is asked)\b|any more|\bas it is\b"
    r"|\bby itself\b|\bbeside\b|\bnobody\b"
)
"""Log lines and errors use the verbs of the field."""
LOCALS_MAX, OPENINGS_MAX, MESSAGES_MAX = 70, 10, 0


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sources("libs", "services"):
        yield path.relative_to(ROOT), parsed(path)


def bad_locals(tree: ast.AST) -> Iterator[str]:
    """Where a variable or parameter is named by one of `LOCALS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and LOCALS.fullmatch(node.id):
            yield f"{node.lineno}: {node.id}"
        elif isinstance(node, ast.arg) and LOCALS.fullmatch(node.arg):
            yield f"{node.lineno}: {node.arg}"


def bad_openings(tree: ast.AST) -> Iterator[str]:
    """Docstrings whose first word is one of `OPENINGS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if OPENINGS.match(text):
                yield f"{node.body[0].lineno}: {text[:60]}"


def bad_messages(tree: ast.AST) -> Iterator[str]:
    """Texts of log lines and errors with one of `MESSAGES`."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(args=[text, *_])):
                pass
            case ast.Call(
                func=ast.Attribute(attr="debug" | "info" | "warning" | "error" | "exception"), args=[text, *_]
            ):
                pass
            case _:
                continue
        parts = [
            part.value for part in ast.walk(text) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if MESSAGES.search(message := " ".join(parts)):
            yield f"{text.lineno}: {message[:80]}"


@pytest.mark.parametrize(
    ("check", "limit"), [(bad_locals, LOCALS_MAX), (bad_openings, OPENINGS_MAX), (bad_messages, MESSAGES_MAX)]
)
def test_names_and_sentences_do_not_get_worse(check: object, limit: int) -> None:
    assert callable(check)
    places = [f"{path}:{place}" for path, tree in _sources() for place in check(tree)]
    assert len(places) <= limit, f"{len(places)} places, {limit} are allowed:\n" + "\n".join(places)
    assert len(places) > limit - 20, f"only {len(places)} are left: lower the limit"


def test_the_checks_see_what_they_are_for() -> None:
    tree = ast.parse(
        '''
def find(there, count):
    """What is here."""
    found = [each for each in there]
    log.warning("it is told what is missing")
    raise KeyError(f"{count} are not here any more")
'''
    )
    assert len(list(bad_locals(tree))) == 3
    assert len(list(bad_openings(tree))) == 1
    assert len(list(bad_messages(tree))) == 2
