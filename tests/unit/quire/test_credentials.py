"""Who calls, which protocol it speaks, and what a failed call means."""

from __future__ import annotations

import grpc
import pytest

from quire import PROTOCOL_OLDEST, PROTOCOL_VERSION
from quire.model import errors
from quire.wire.credentials import authorization, bearer, check_proof, is_operator, operator_token, page_token, proof
from quire.wire.status import error_of, unsent, went_away
from quire.wire.version import HEADER, SPOKEN, check, check_metadata


def test_a_member_is_known_by_any_of_the_secrets() -> None:
    token = operator_token("new")
    assert is_operator(token, "old", "new")
    assert not is_operator(token, "old")
    assert not is_operator("", "")
    assert operator_token("") == ""
    assert len({token, operator_token("old"), page_token(b"new")}) == 3


def test_a_proof_is_of_one_incarnation() -> None:
    shown = proof("storage-0", "7", b"new")
    check_proof(shown, "storage-0", "7", b"old", b"new")
    for wrong in (
        (shown, "storage-1", "7", b"new"),
        (shown, "storage-0", "8", b"new"),
        (shown, "storage-0", "7", b"old"),
    ):
        with pytest.raises(errors.SecretDiffers, match="QUIRE_CLUSTER_SECRET"):
            check_proof(*wrong)
    with pytest.raises(errors.SecretDiffers, match="ACCEPT_UNPROVEN"):
        check_proof(b"", "storage-0", "7", b"new")


def test_the_header_of_a_token() -> None:
    assert bearer(authorization("secret")) == "secret"
    assert authorization("") == bearer("") == bearer("Basic secret") == ""


def test_a_protocol_that_either_side_understands() -> None:
    check_metadata({})
    check_metadata(dict(SPOKEN))
    check_metadata({HEADER: f"{PROTOCOL_VERSION}-{PROTOCOL_VERSION + 5}"})
    check_metadata({HEADER: str(PROTOCOL_VERSION)})
    check(PROTOCOL_OLDEST)
    for said in f"{PROTOCOL_VERSION + 1}-{PROTOCOL_VERSION + 5}", str(PROTOCOL_OLDEST - 1), "new", "1-x", "":
        with pytest.raises(errors.VersionUnsupported, match="upgrade the older side"):
            check_metadata({HEADER: said})
    with pytest.raises(errors.VersionUnsupported, match=f"protocol {PROTOCOL_OLDEST - 1}"):
        check(PROTOCOL_OLDEST - 1)


def _failed(code: grpc.StatusCode, **trailers: str) -> grpc.aio.AioRpcError:
    pairs = [(name.replace("_", "-"), value) for name, value in trailers.items()]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*pairs), "why")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNAVAILABLE, errors.NodeUnavailable),
        (grpc.StatusCode.CANCELLED, errors.NodeUnavailable),
        (grpc.StatusCode.UNIMPLEMENTED, errors.NotImplementedHere),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ResourceExhausted),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ],
)
def test_a_call_that_no_server_of_ours_answered(code: grpc.StatusCode, kind: type[errors.QuireError]) -> None:
    error = error_of(_failed(code))
    assert type(error) is kind
    assert "why" in str(error)
    assert not error.answered
    assert not error.unsent
    assert error_of(unsent(_failed(code))).unsent


def test_which_failures_mean_that_the_server_went_away() -> None:
    assert went_away(_failed(grpc.StatusCode.UNAVAILABLE))
    assert went_away(_failed(grpc.StatusCode.CANCELLED))
    assert not went_away(_failed(grpc.StatusCode.DEADLINE_EXCEEDED))
    assert not went_away(_failed(grpc.StatusCode.UNAVAILABLE, quire_error=errors.Unavailable.code()))
