"""Permits hold for exactly one transfer."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.descriptor import RdmaTarget
from quire.errors import LeaseExpired, LeaseForged
from quire.keys import ChunkKeys
from quire.permit import PermitSigner

SIGNER = PermitSigner(b"a secret")
KEYS, TARGET, TRANSFER = ChunkKeys(os.urandom(96)), RdmaTarget(b"worker", 4096, 1 << 20, b"rkey"), os.urandom(16)
PERMIT = SIGNER.sign("honest", TRANSFER, KEYS, TARGET, 1000)


def test_what_was_signed_is_permitted_until_it_expires() -> None:
    assert SIGNER.verify(PERMIT, TRANSFER, KEYS, TARGET, 999) == "honest"
    with pytest.raises(LeaseExpired):
        SIGNER.verify(PERMIT, TRANSFER, KEYS, TARGET, 1000)


@pytest.mark.parametrize(
    ("transfer", "keys", "target"),
    [
        (os.urandom(16), KEYS, TARGET),
        (TRANSFER, KEYS.run(0, 2), TARGET),
        (TRANSFER, KEYS, replace(TARGET, address=8192)),
        (TRANSFER, KEYS, replace(TARGET, length=2 << 20)),
        (TRANSFER, KEYS, replace(TARGET, remote_key=b"rkez")),
        (TRANSFER, KEYS, replace(TARGET, worker_address=b"workes")),
        (TRANSFER, KEYS, replace(TARGET, worker_address=b"workerr", remote_key=b"key")),
    ],
)
def test_nothing_else_is(transfer: bytes, keys: ChunkKeys, target: RdmaTarget) -> None:
    """Other keys, other memory, more of it: none of it was signed."""
    with pytest.raises(LeaseForged):
        SIGNER.verify(PERMIT, transfer, keys, target, 0)


@given(at=st.integers(0, len(PERMIT) - 1), bit=st.integers(0, 7), cut=st.integers(0, len(PERMIT)))
def test_no_bit_of_it_may_change(at: int, bit: int, cut: int) -> None:
    changed = bytearray(PERMIT)
    changed[at] ^= 1 << bit
    for wrong in (bytes(changed), PERMIT[:cut] if cut < len(PERMIT) else b"", PERMIT + b"x"):
        with pytest.raises(LeaseForged):
            SIGNER.verify(wrong, TRANSFER, KEYS, TARGET, 0)


def test_another_clusters_secret_is_worth_nothing() -> None:
    with pytest.raises(LeaseForged):
        PermitSigner(b"another").verify(PERMIT, TRANSFER, KEYS, TARGET, 0)
