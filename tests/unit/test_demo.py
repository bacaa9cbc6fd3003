"""`quire demo` when something does not work: a line with the step, the limit and the log, no stack trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quire.model.errors import DeadlineExceeded, Unavailable
from quire_tools.cli.demos.kv import Demo, _step


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        ("echo broken >&2; exit 3", Unavailable, "the producer ended with status 3; see .*producer.log"),
        ("sleep 60", DeadlineExceeded, "the limit is 0.4 s in which it does nothing .--timeout.; see .*producer.log"),
    ],
)
def test_the_other_process(
    script: str, error: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec /bin/sh -c '{script}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(error, match=text):
        Demo(tmp_path, "127.0.0.1:1", timeout_s=0.4)._produce("127.0.0.1:1")
    assert (tmp_path / "producer.log").read_text() == ("broken\n" if "broken" in script else "")


def test_a_step_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with _step("one"):
        pass
    with pytest.raises(Unavailable), _step("two"):
        raise Unavailable("no")
    assert "✓ one" in (shown := capsys.readouterr().out) and "✗ two" in shown
