"""The limit of open files of a service."""

from __future__ import annotations

import resource

import pytest

from quire_server.service import raise_descriptors


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((1024, 4096), 4096),
        ((1024, 1 << 30), 65_536),
        ((1024, resource.RLIM_INFINITY), 65_536),
        ((1 << 20, 1 << 20), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_it_is_raised_towards_the_hard_limit(
    limits: tuple[int, int], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: changed.append(wanted))
    raise_descriptors()
    assert changed == ([(expected, limits[1])] if expected is not None else [])
