"""How many decoders `quire up` starts."""

from __future__ import annotations

import pytest

from quire.model.errors import ConfigInvalid
from quire_tools.cli import cluster


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the packages of decoders, as an engine's is."""
    monkeypatch.setattr(cluster, "_OF_DECODERS", ("numpy", "no_such_package"))


@pytest.mark.parametrize(("number", "expected"), [(None, 1), (0, 0), (3, 3)])
def test_one_is_the_default(number: int | None, expected: int) -> None:
    assert cluster.count_decoders(number) == expected


@pytest.mark.parametrize("number", [None, 0])
def test_without_their_packages_there_is_none(
    lean: None, number: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.count_decoders(number) == 0
    said = capsys.readouterr().out
    assert said == "" if number == 0 else "no_such_package not installed here: pip install 'quire[decoder]'" in said


def test_decoders_that_cannot_start_are_refused(lean: None) -> None:
    with pytest.raises(ConfigInvalid, match="2 decoders: no_such_package not installed"):
        cluster.count_decoders(2)
