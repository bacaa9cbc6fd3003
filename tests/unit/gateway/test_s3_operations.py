"""The table of S3's operations, compared with the model of S3 that botocore ships."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qsl

import botocore.session
import pytest

from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.s3_operations import COPIES, OF_ANY_REQUEST, OPERATIONS, Operation, operation_of
from quire_gateway.s3.frontend import OF_BUCKETS, OF_OBJECTS, OF_SETTINGS

_MODEL: Any = botocore.session.get_session().get_service_model("s3")
_HERE = {operation.name: operation for operation in (*OPERATIONS, *COPIES)}
_CONFIRMED = {
    *("x-amz-date", "x-amz-content-sha256", "x-amz-security-token", "x-amz-user-agent", "x-amz-trailer"),
    *("x-amz-acl", "x-amz-storage-class"),
}
"""Headers of the signature and of the framing, which are in no operation's model; and what clients send with all."""


def _target(name: str) -> tuple[str, str, dict[str, str]]:
    """Level, method and query of an operation as the model has it."""
    http = _MODEL.operation_model(name).http
    path, _, query = http["requestUri"].partition("?")
    level = "object" if "{Key" in path else "bucket" if "{Bucket}" in path else "service"
    return level, http["method"], dict(parse_qsl(query, keep_blank_values=True))


def _members(name: str, location: str) -> set[str]:
    shape = _MODEL.operation_model(name).input_shape
    members = shape.members.values() if shape is not None else ()
    return {member.serialization["name"] for member in members if member.serialization.get("location") == location}


def test_each_operation_has_a_handler() -> None:
    assert _HERE.keys() == OF_BUCKETS.keys() | OF_SETTINGS.keys() | OF_OBJECTS.keys()


@pytest.mark.parametrize("operation", _HERE.values(), ids=lambda operation: operation.name)
def test_names_are_those_of_s3(operation: Operation) -> None:
    level, method, query = _target(operation.name)
    assert (operation.level, operation.method) == (level, method)
    parameters = _members(operation.name, "querystring") | query.keys()
    assert not operation.parameters - parameters, "no parameter is invented"
    assert {operation.subresource} <= parameters | {""}
    headers = {name.lower() for name in _members(operation.name, "header")} | _CONFIRMED
    headers |= {"x-amz-decoded-content-length", "x-amz-sdk-checksum-algorithm"}
    plain = {name for name in operation.headers if not name.endswith("-")}
    assert not {name for name in plain if name not in headers}, "no header is invented"
    selected = operation_of(level, method, query | _selected(operation), copies=operation in COPIES)
    assert selected is operation, "a request for it finds it"


def _selected(operation: Operation) -> dict[str, str]:
    return {operation.subresource: "2"} if operation.subresource else {}


_SAME: Final = {"ListDirectoryBuckets", "GetBucketLifecycle", "PutBucketLifecycle"}
"""The same requests as others: sent to another host, or as the model had them before."""


@pytest.mark.parametrize("name", sorted(set(_MODEL.operation_names) - _HERE.keys() - _SAME))
def test_an_operation_that_is_not_here_is_none_of_those_that_are(name: str) -> None:
    """Not either with the parameters that all its requests have."""
    level, method, query = _target(name)
    shape = _MODEL.operation_model(name).input_shape
    required = {
        member.serialization["name"]: "1"
        for key, member in shape.members.items()
        if key in shape.required_members and member.serialization.get("location") == "querystring"
    }
    headers = [
        (member.serialization["name"], "1")
        for key, member in shape.members.items()
        if key in shape.required_members and member.serialization.get("location") == "header"
    ]
    copies = any(header.lower() == "x-amz-copy-source" for header, _ in headers)
    with pytest.raises(S3Error) as refused:
        operation_of(level, method, query | required, copies=copies).check(query | required, headers)
    assert refused.value.code in ("NotImplemented", "MethodNotAllowed")


@pytest.mark.parametrize("operation", _HERE.values(), ids=lambda operation: operation.name)
def test_what_an_operation_does_not_take_is_refused(operation: Operation) -> None:
    """Parameters and headers of the model that the table does not have are refused one by one."""
    query = _selected(operation)
    for name in _members(operation.name, "querystring") - operation.parameters - {operation.subresource}:
        with pytest.raises(S3Error, match="is not implemented here"):
            operation.check(query | {name: "1"}, [])
    for name in _members(operation.name, "header"):
        low = name.lower()
        taken = low in operation.headers | OF_ANY_REQUEST or any(
            prefix.endswith("-") and low.startswith(prefix) for prefix in operation.headers
        )
        if low.startswith("x-amz-") and not taken:
            with pytest.raises(S3Error, match="is not implemented here"):
                operation.check(query, [(name, "1")])


@pytest.mark.parametrize(
    ("name", "query", "headers"),
    [
        ("PutObject", {"renameObject": ""}, {}),
        ("PutObject", {}, {"x-amz-write-offset-bytes": "4"}),
        ("PutObject", {}, {"X-Amz-Server-Side-Encryption": "aws:kms"}),
        ("PutObject", {}, {"x-amz-website-redirect-location": "/a"}),
        ("PutObject", {}, {"x-amz-storage-class": "GLACIER"}),
        ("PutObject", {"x-amz-meta-colour": "red"}, {}),
        ("PutObject", {"x-amz-server-side-encryption": "AES256"}, {}),
        ("CopyObject", {"x-amz-tagging-directive": "REPLACE"}, {}),
        ("PutObject", {"x-amz-storage-class": "GLACIER"}, {}),
        ("DeleteBucket", {"metadataTable": ""}, {}),
        ("DeleteObject", {}, {"x-amz-mfa": "3"}),
        ("GetObject", {"torrent": ""}, {}),
        ("CreateBucket", {}, {"x-amz-bucket-object-lock-enabled": "true"}),
    ],
)
def test_nothing_is_done_that_was_not_meant(name: str, query: dict[str, str], headers: dict[str, str]) -> None:
    with pytest.raises(S3Error) as refused:
        _HERE[name].check(query, headers.items())
    assert refused.value.code == "NotImplemented"


@pytest.mark.parametrize(
    ("name", "query", "headers"),
    [
        ("PutObject", {"x-id": "PutObject"}, {"x-amz-storage-class": "STANDARD", "x-amz-meta-colour": "red"}),
        ("PutObject", {"X-Amz-Signature": "0", "X-Amz-Expires": "9", "x-amz-checksum-crc32": "AAAAAA=="}, {}),
        ("PutObject", {"x-amz-acl": "private", "x-amz-storage-class": "STANDARD"}, {"x-amz-cf-id": "abc"}),
        ("CopyObject", {}, {"x-amz-copy-source": "a/b", "x-amz-tagging-directive": "REPLACE"}),
        ("ListMultipartUploads", {"uploads": "", "delimiter": ""}, {}),
        ("CompleteMultipartUpload", {"uploadId": "u"}, {"x-amz-mp-object-size": "5"}),
        ("DeleteObject", {"versionId": "abc"}, {"x-amz-bypass-governance-retention": "true"}),
        ("PutObject", {}, {"x-amz-tagging": "a=b", "x-amz-server-side-encryption": "AES256"}),
        ("GetObject", {"versionId": "null", "response-expires": "0"}, {"x-amz-checksum-mode": "ENABLED"}),
        ("CreateBucket", {}, {"x-amz-bucket-object-lock-enabled": "false", "Content-Type": "application/xml"}),
        ("ListObjectsV2", {"list-type": "2", "fetch-owner": "true"}, {"X-Amz-Request-Payer": "requester"}),
    ],
)
def test_what_clients_send_is_taken(name: str, query: dict[str, str], headers: dict[str, str]) -> None:
    _HERE[name].check(query, headers.items())
