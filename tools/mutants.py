"""Mutation testing of what must not be wrong: pacing, permits, the prefix index and the residency machine.

python tools/mutants.py pacing permits      status 1 if a mutant survives that is not explained below

mutmut changes one thing at a time and runs the tests that reach it: first those that are quick, then for what survived
also those on a Redis Cluster. It wants packages beside each other, so they are copied to build/mutants.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "build" / "mutants"
_PACKAGES: Final = ("libs/quire", "libs/quire_server", "services/storage/quire_storage")
_FIXTURES: Final = ("__init__.py", "conftest.py", "workers.py", "fork_server.py", "hosts.py", "redis_cluster.py")
_SETTINGS: Final = """\
[tool.mutmut]
source_paths = {packages}
only_mutate = {modules}
pytest_add_cli_args_test_selection = ["tests"]
pytest_add_cli_args = ["-q", "-p", "no:cacheprovider", "-k", "{chosen}"]
timeout_multiplier = 2.0
timeout_constant = 5.0
use_git_change_detection = false
track_dependencies = false
[tool.pytest.ini_options]
asyncio_mode = "auto"
timeout = 120
"""


class Scope(NamedTuple):
    """Modules to change, the tests that should notice, and what these need beside them."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    helpers: tuple[str, ...] = ()


SCOPES: Final = {
    "pacing": Scope(("quire_storage/core/pacing.py",), ("unit/storage/test_pacing.py",)),
    "permits": Scope(("quire/model/permit.py",), ("unit/quire/test_permit.py",)),
    "index": Scope(("quire_server/redis/index.py", "quire/model/index.py"), ("contract/test_index.py",)),
    "residency": Scope(
        tuple(
            f"quire_storage/core/residency/{name}.py"
            for name in (
                *("admission", "contents", "copies", "departures", "evictions", "machine", "memory", "pins"),
                *("promotions", "stores", "uploads", "writes"),
            )
        ),
        (
            "unit/storage/test_residency.py",
            "unit/storage/test_residency_histories.py",
            "unit/storage/test_residency_listing.py",
            "unit/storage/test_residency_levels.py",
            "unit/storage/test_residency_policy.py",
            "unit/storage/test_housekeeping.py",
            "unit/storage/test_fingerprint_index.py",
        ),
        (
            "unit/storage/residency_world.py",
            "unit/storage/residency_answers.py",
            "unit/storage/residency_histories.py",
        ),
    ),
}
EXPLAINED: Final = {
    "pacing": {
        "if self._credit <= -1e-3": "a debt of exactly a thousandth of a byte, which no sum of sizes leaves",
    },
    "permits": {
        "XXno member of this cluster has signed this requestXX": "tests look for what it says",
        "XXthe transfer was permitted too long agoXX": "tests look for what it says",
    },
    "index": {
        "cast(None,": "a cast does nothing when it runs",
        "strict=None": "what a script answers is of the length that it was asked for",
        "strict=False": "what a script answers is of the length that it was asked for",
        "flat[2::3], )": "what a script answers is of the length that it was asked for",
        "rest[count:], )": "what a script answers is of the length that it was asked for",
        "from_bytes(answer[:8], )": "the order of bytes that is meant anyway",
        "from_bytes(packed[middle:end], )": "the order of bytes that is meant anyway",
        "to_bytes(8, )": "the order of bytes that is meant anyway",
        "hincrby(_CHANGES_KEY, node_id, )": "by one, as is meant",
        "zip(part, mask, )": "what a script answers is of the length that it was asked for",
        "zip(chunks, generations, )": "callers give one for each",
        "zip(openers, parts, )": "made together",
        "calls), ):": "a pipeline answers each of its calls",
        "names]), ):": "a pipeline answers each of its calls",
        "transaction=None": "a pipeline of one key's calls: only a crash in between would show it",
        "transaction=False": "a pipeline of one key's calls: only a crash in between would show it",
        "tag), 1, now_ms": "nothing is due in the first millisecond of 1970",
        "count=None, _type": "the portion that Redis takes by itself",
        "match=PAGES, _type": "the portion that Redis takes by itself",
        '_type="STRING"': "Redis reads it in capitals, too",
        "self._draw(9)": "how long a random name is",
        "len(prints), ):": "pins of keys that nothing is at are asked for, too",
        "len(part), ))": "pins of keys that nothing is at are asked for, too",
        'else "XXXX", ",".join': "the script asks whether it is 1",
        'now_ms, "XXXX", ""]': "the script asks whether it is 1",
        "self._changes(None)": "reads of all nodes what is told of one",
        'elsewhere: bytes = b"XXXX"': "roots have no parent, so no bucket of it",
        "if (chunk.parent) or True else _NO_PARENT": "the fingerprint of no parent is that of none",
        "PRINT_BYTES), chunks, )": "made together",
        "from_bytes(print_[:6], )": "the order of bytes that is meant anyway",
        "from_bytes(self._draw(8), )": "the order of bytes that is meant anyway",
        "from_bytes(marks[at + 1 : at + 9], )": "the order of bytes that is meant anyway",
        '"big") | 2)': "not zero, as is meant",
        "keys if (node_id == OBJECT_TIER) or True": "the script reads keys for the object tier alone",
        'OBJECT_TIER else b"XXXX"': "the script reads keys for the object tier alone",
        'if crosses else (b"XXXX", b"")': "read only where it crosses",
        "orphaned[2::3], ):": "what a script answers is of the length that it was asked for",
        "zip(orphaned[::4]": "the first chunk of a bucket alone has its parent in another one",
        "orphaned[1::4]": "the first chunk of a bucket alone has its parent in another one",
        "orphaned[2::4]": "the first chunk of a bucket alone has its parent in another one",
        "if (not self._cluster) and False else [[tag]": "in one call or in several",
        ".get(node_id, None)": "a node that is asked for is in the answer",
        ".get(node_id, )": "a node that is asked for is in the answer",
        "cursor & ((1 >> _MASTER_SHIFT) - 1)": "Redis takes of a cursor what its table needs",
        "cursor & ((2 << _MASTER_SHIFT) - 1)": "Redis takes of a cursor what its table needs",
        "< len(masters)) or True else 0": "an empty page more",
        "number - 1 < len(masters)": "an empty page more",
        "number + 1 <= len(masters)": "an empty page more",
        'execute_command("evalsha"': "Redis reads it in small letters, too",
    },
    "residency": {
        "self.last_number = 2 << 40": "tickets of callers are below",
        "self.last_number = 1 << 41": "tickets of callers are below",
        "self.now_s = None": "the first event brings the time",
        "self.now_s = 1.0": "the first event brings the time",
        "len(skipped) <= _SLABS_TRIED": "one slab more is tried",
        "copies.now_s <= self._trim_at_s": "at that time, or at the next event",
        "+        victims = None": "what was set aside is looked at again, which finds the same",
        "if (pool is not None) and False else 0)": "how far the order adapts, which its own tests look at",
        "if pool is not None else 1)": "without a drive nothing is in that order",
        "self.unblocked = self.space_freed =": "the first event looks at both anyway",
        "self._trimming = None": "False or None: only whether it is is asked",
        "self.stopping = None": "0 or None: only whether there is one is asked",
        "space_freed = None": "False or None: only whether there is is asked",
        "now_s <= self.flush_at_s": "at that time, or at the next event",
        "if used >= self._settings.pool_high_share": "exactly at the watermark",
        "self._trimming = excess >= 0": "exactly at the watermark",
        "self._trimming = excess > 1": "a byte less than is wanted: slots are far larger",
        "if needed <= 1": "a byte less than is wanted: slots are far larger",
        "if excess <= 1 and": "a byte less than is wanted: slots are far larger",
        "copies.pool is None and not copies.dirty": "without a drive, or without anything to write, the group is empty",
        "bool(unplaced or copies.leaving_bytes)": "without one of them nothing is wanted, or nothing comes free",
        "victims: list[Entry] = None": "what follows asks for others where there are none",
        "if excess <= 0 or unplaced": "which go first where both are wanted",
        "        self._trimming = True": "where nothing may go now, it goes on to the low watermark later",
        "or self._flushing and copies.now_s": "the first of the order are those that are being written",
        "not copies.dirty and self._flushing": "the first of the order are those that are being written",
        "if group or copies.pool.working": "a write that finds no drive is given up at once",
        "(1 >> 63) +": "no chunk of a drive is as old as a new one's number",
        "(2 << 63) +": "older than what is on drives, either way",
        "(1 << 64) +": "older than what is on drives, either way",
        "self.pool.age(key) if (self.pool is not None) or True": "where there is no drive every readable copy is awake",
        '] = ""': "a set in the order of insertion: its values are not looked at",
        "strict=None": "as many, by the way in which they were made",
        "strict=False": "as many, by the way in which they were made",
        "event.offsets, )": "as many, by the way in which they were made",
        "write.places, )": "as many, by the way in which they were made",
        "write.headers, )": "as many, by the way in which they were made",
        "offsets, )]": "there may be fewer slots than copies, as is meant",
        "entry.promotion = None": "0 or None: only whether there is one is asked",
        "entry.write = None": "0 or None: only whether there is one is asked",
        "entry.provisional = None": "False or None: only whether it is is asked",
        "entry.in_object = None": "False or None: only whether it is is asked",
        "set_generation(entry, None)": "0 or None: only whether there is one is asked",
        "self._ask(entries, tier, None, event)": "False or None: only whether it is is asked",
        "unblocked = None": "False or None: only whether they may is asked",
        "Goal(event.ticket, entries, None)": "`_register` says what comes after",
        "if current is None or": "the index is told at once, not when the store fails",
        "entries.get(None)": "`find_resident`, which follows, finds the same: this is the short way",
        "+        entry = None": "`find_resident`, which follows, finds the same: this is the short way",
        "popitem(last=None)": "the first one, as is meant",
        "entry.chunk.shape.slot_bytes <= _CROWDED": "no sum of slots is four fifths of a power of two",
        "evicted.append(None)": "only how many went is looked at",
        "self._refused, self._pause_s = 1, RETRY_S": "one question less before a pause",
        "if self._refused >= len(question.tier)": "one question less before a pause",
        "self._refused = 1": "one question less before a pause",
        "question.tier.touch(None)": "it comes into the order anew, at the end, either way",
        "victims, size = list[Entry](), 1": "a byte less than is wanted: slots are far larger",
        "entry.generation != 1": "only what is listed is considered",
        "self.last_number += 2": "numbers grow, that is all",
    },
}
"""Survivors that are no fault, by a part of the changed line."""


def prepare(names: Sequence[str]) -> None:
    """The packages, and the tests of these scopes, beside each other."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for package in _PACKAGES:
        shutil.copytree(ROOT / package, FOLDER / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        for file in (*SCOPES[name].tests, *SCOPES[name].helpers):
            (FOLDER / "tests" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "tests" / file, FOLDER / "tests" / file)
    for file in _FIXTURES:
        shutil.copy2(ROOT / "tests" / file, FOLDER / "tests" / file)


def _run(names: Sequence[str], chosen: str, mutants: Sequence[str] = ()) -> None:
    """With the tests that `chosen` is true of, as pytest's -k reads it."""
    modules = [module for name in names for module in SCOPES[name].modules]
    packages = [Path(package).name for package in _PACKAGES]
    (FOLDER / "pyproject.toml").write_text(_SETTINGS.format(packages=packages, modules=modules, chosen=chosen))
    subprocess.run([sys.executable, "-m", "mutmut", "run", *mutants], cwd=FOLDER, check=True)


def _mutmut(*arguments: str) -> str:
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False).stdout


def _survivors() -> list[str]:
    states = [line.strip().partition(": ") for line in _mutmut("results").splitlines()]
    return [mutant for mutant, _, state in states if state in ("survived", "no tests")]


def _why(mutant: str, changed: Sequence[str]) -> str:
    """The reason why a survivor is no fault; empty if it may be one."""
    lines = [each.lstrip("+- ").replace("XX", "").lower() for each in changed]
    if len(set(lines)) == 1 and lines[0].startswith("assert "):
        return "the words of an assertion"
    module = mutant.partition(".x")[0].replace(".", "/") + ".py"
    reasons = next(EXPLAINED[name] for name, scope in SCOPES.items() if module in scope.modules)
    return next((why for part, why in reasons.items() if any(part in each for each in changed)), "")


def main(arguments: Sequence[str]) -> None:
    names = list(arguments) or list(SCOPES)
    if unknown := set(names) - SCOPES.keys():
        sys.exit(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(SCOPES)}")
    prepare(names)
    _run(names, "not redis_cluster")
    if survivors := [mutant for mutant in _survivors() if ".redis." in mutant]:
        _run(names, "", survivors)
    left = 0
    for mutant in _survivors():
        changed = [each for each in _mutmut("show", mutant).splitlines() if each[:2] in ("- ", "+ ")]
        why = _why(mutant, changed)
        left += not why
        print(mutant, *changed, f"explained: {why}" if why else "NOT EXPLAINED", sep="\n", end="\n\n")
    sys.exit(f"{left} mutants survive unexplained" if left else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
