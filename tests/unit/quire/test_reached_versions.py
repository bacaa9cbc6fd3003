"""Versions of UCX that are accepted at the other end, and the error that refuses the rest."""

from __future__ import annotations

import pytest

from pyucx import library
from quire.model.errors import TargetInvalid
from quire.transport import ucx


@pytest.mark.parametrize(
    ("ours", "theirs", "reach"),
    [(22, 22, True), (19, 22, True), (20, 23, True), (15, 18, True), (19, 20, False), (18, 22, False), (13, 22, False)],
)
def test_versions_that_reach_each_other(ours: int, theirs: int, reach: bool) -> None:
    assert ucx.understands((1, ours), (1, theirs)) == ucx.understands((1, theirs), (1, ours)) == reach


def test_both_versions_are_named() -> None:
    framed = bytearray(ucx._framed(b"address"))
    framed[3:5] = bytes([1, 13])
    ours = ".".join(map(str, library.version))
    with pytest.raises(TargetInvalid, match=rf"UCX 1\.13, and this UCX {ours}, which reaches .*1\.\d+ alone"):
        ucx._unframed(bytes(framed))
