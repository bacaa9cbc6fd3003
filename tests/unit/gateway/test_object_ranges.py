"""Ranges and conditions of S3 objects, and the errors that clients see."""

from __future__ import annotations

import pytest

from quire.model import errors
from quire_gateway.core.preconditions import Preconditions
from quire_gateway.core.ranges import check_read, check_write, read_copy_range, read_range
from quire_gateway.core.s3_errors import STATUS, S3Error, s3_error_of


def test_a_range_within_an_object() -> None:
    assert read_range("bytes=2-5", 10) == (2, 6)
    assert read_range("bytes=-3", 10) == (7, 10)
    assert read_range("bytes=8-100", 10) == (8, 10)
    assert read_range("", 10) is None
    with pytest.raises(S3Error) as refused:
        read_range("bytes=10-", 10)
    assert (refused.value.code, refused.value.status) == ("InvalidRange", 416)
    assert refused.value.headers == {"Content-Range": "bytes */10"}


def test_a_range_of_a_copied_part() -> None:
    assert read_copy_range("bytes=0-9", 10) == (0, 10)
    assert read_copy_range("bytes=9-9", 10) == (9, 10)
    for wrong in "bytes=0-10", "bytes=5-4", "bytes=5-", "bytes=-5", "0-9", f"bytes=0-{10**20}":
        with pytest.raises(S3Error) as refused:
            read_copy_range(wrong, 10)
        assert refused.value.code == "InvalidArgument"


def test_conditions_on_reads() -> None:
    check_read(Preconditions(), "e", 0.0)
    check_read(Preconditions(if_match='"e"'), "e", 0.0)
    with pytest.raises(S3Error) as refused:
        check_read(Preconditions(if_match='"x"'), "e", 0.0)
    assert refused.value.status == 412
    with pytest.raises(S3Error) as unchanged:
        check_read(Preconditions(if_none_match='"e"'), "e", 0.0)
    assert (unchanged.value.status, unchanged.value.headers) == (304, {"ETag": '"e"'})


def test_conditions_on_writes() -> None:
    check_write(Preconditions(if_none_match="*"), None)
    check_write(Preconditions(if_match='"e"'), "e")
    for conditions, there, code in (
        (Preconditions(if_none_match="*"), "e", "PreconditionFailed"),
        (Preconditions(if_match='"x"'), "e", "PreconditionFailed"),
        (Preconditions(if_match='"x"'), None, "NoSuchKey"),
    ):
        with pytest.raises(S3Error) as refused:
            check_write(conditions, there)
        assert refused.value.code == code


def test_errors_of_quire_are_errors_of_s3() -> None:
    assert s3_error_of(errors.ChunkMissing("gone")).code == "NoSuchKey"
    busy = s3_error_of(errors.TooManyRequests("busy", retry_after_s=0.2))
    assert (busy.code, busy.status, busy.headers) == ("SlowDown", 503, {"Retry-After": "1"})
    inside = s3_error_of(errors.InternalError("a path on the server"))
    assert (inside.status, "path" in inside.message) == (500, False)
    away = s3_error_of(errors.NodeUnavailable("10.0.0.7 does not answer"))
    assert (away.status, "10.0.0.7" in away.message) == (503, False)


def test_every_error_has_an_answer() -> None:
    pending = [errors.QuireError]
    while pending:
        kind = pending.pop()
        assert s3_error_of(kind("why")).code in STATUS
        pending += kind.__subclasses__()
