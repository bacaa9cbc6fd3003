"""A proof is of one tenant, one address and its time."""

from __future__ import annotations

import pytest

from quire.model.address_proof import AddressProofs, ProofStep
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.errors import AddressUnproven, TargetInvalid
from quire.model.keys import ChunkKeys

OLD, NEW = b"o" * 32, b"n" * 32
NONCE = b"n" * 16


@pytest.mark.parametrize("step", ProofStep)
def test_a_challenge_is_answered_by_its_nonce_only(step: ProofStep) -> None:
    proofs = AddressProofs(OLD)
    challenge = proofs.challenge(step, "alice", b"here", NONCE, 1000)
    assert proofs.answered(challenge, "alice", b"here", NONCE, 999) is step
    for wrong in (
        (challenge, "alice", b"here", b"m" * 16, 999),
        (challenge, "mallory", b"here", NONCE, 999),
        (challenge, "alice", b"there", NONCE, 999),
        (challenge, "alice", b"here", NONCE, 1000),
        (challenge[:-1] + b"\0", "alice", b"here", NONCE, 999),
        (b"", "alice", b"here", NONCE, 999),
        (proofs.proof("alice", b"here", 1000), "alice", b"here", NONCE, 999),
    ):
        with pytest.raises(AddressUnproven):
            proofs.answered(*wrong)
        with pytest.raises(AddressUnproven):
            proofs.check(challenge, "alice", b"here", 0)


def test_a_proof_holds_through_a_change_of_the_clusters_secret() -> None:
    proof = AddressProofs(OLD).proof("alice", b"here", 1000)
    AddressProofs(NEW, OLD).check(proof, "alice", b"here", 999)
    for proofs, tenant, address, now_ms in (
        (AddressProofs(NEW), "alice", b"here", 999),
        (AddressProofs(OLD), "", b"here", 999),
        (AddressProofs(OLD), "alice", b"", 999),
        (AddressProofs(OLD), "alice", b"here", 1000),
    ):
        with pytest.raises(AddressUnproven):
            proofs.check(proof, tenant, address, now_ms)


def test_a_proof_goes_with_its_target() -> None:
    """Also in the headers of S3, which read as before without one."""
    shown, plain = RdmaTarget(b"w", 4096, 64, b"k", b"proof"), RdmaTarget(b"w", 4096, 64, b"k")
    assert RdmaTarget.from_token(shown.to_token()).proof == b"proof"
    assert plain.to_token() == shown.to_token().rpartition(".")[0]
    for target in (shown, plain):
        descriptor = Descriptor(ChunkKeys(bytes(32)), 1, 16, 64, DeliveryOrder.AUTO, target)
        again = Descriptor.from_header(descriptor.to_header())
        assert (again, again.target.proof) == (descriptor, target.proof)
    with pytest.raises(TargetInvalid):
        RdmaTarget.from_token(plain.to_token() + ".!")
    with pytest.raises(TargetInvalid):
        RdmaTarget(b"w", 4096, 64, b"k", bytes(2000))
