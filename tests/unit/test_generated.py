"""Pages and names that are made from the code; that they are up to date is for `make check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.model import errors
from tools import generated, reference


def test_a_page_that_says_something_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "errors.md"
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "pages", lambda: {page: "as it should be"})
    with pytest.raises(SystemExit, match="make generated"):
        reference.main(["--check"])
    page.parent.mkdir()
    reference.main([])
    reference.main(["--check"])


def test_pages_have_all_there_is() -> None:
    pages = {file.name: text for file, text in reference.pages().items()}
    assert all(f"`{name}`" in pages["configuration.md"] for name in ("QUIRE_ZONE", "QUIRE_STORAGE_DRIVE_BYTES"))
    assert "`quire keys create`" in pages["cli.md"] and "`quire bench pool`" in pages["cli.md"]
    assert "`quire_storage_checksum_failures_total`" in pages["metrics.md"]
    assert all(f"`{kind.__name__}`" in pages["errors.md"] for kind in errors.QuireError.__subclasses__())
    assert "`Heartbeat`" in pages["grpc.md"] and "Longest cached prefix" in pages["grpc.md"]
    assert generated.VARIABLES.exists()
