"""Settings of buckets and objects by boto3: versions, tags, attributes, CORS, lifecycle, encryption."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.s3_place import Place, boto, refused, s3_place

_PART_BYTES = 5 << 20
_ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with s3_place(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def client(place: Place) -> Any:
    return boto(place, tls=False, signature_version="s3v4")


def _read(client: Any, **arguments: Any) -> bytes:
    return bytes(client.get_object(**arguments)["Body"].read())


@dataclass(frozen=True)
class _Answer:
    """`headers`: by lower-case names."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes


def _ask(method: str, url: str, headers: Mapping[str, str]) -> _Answer:
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return _Answer(
                answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()
            )
    except urllib.error.HTTPError as error:
        return _Answer(error.code, {name.lower(): value for name, value in error.headers.items()}, error.read())


def test_versions(client: Any) -> None:
    """Replaced and deleted objects stay readable by their versions, and restorable."""
    client.create_bucket(Bucket="kept")
    at = {"Bucket": "kept", "Key": "state"}
    assert "VersionId" not in client.put_object(**at, Body=b"0")
    assert "Status" not in client.get_bucket_versioning(Bucket="kept")
    client.put_bucket_versioning(Bucket="kept", VersioningConfiguration={"Status": "Enabled"})
    assert client.get_bucket_versioning(Bucket="kept")["Status"] == "Enabled"
    first, second = (client.put_object(**at, Body=body)["VersionId"] for body in (b"1", b"2"))
    assert client.get_object(**at)["VersionId"] == second
    assert [_read(client, **at, VersionId=version) for version in ("null", first, second)] == [b"0", b"1", b"2"]
    copied = client.copy_object(**at, CopySource=at | {"VersionId": first})
    assert copied["CopySourceVersionId"] == first and _read(client, **at) == b"1"
    marker = client.delete_object(**at)
    assert marker["DeleteMarker"]
    refused(client.get_object, "NoSuchKey", **at)
    refused(client.get_object, "MethodNotAllowed", **at, VersionId=marker["VersionId"])
    refused(client.get_object, "NoSuchVersion", **at, VersionId="0" * 31)
    for invalid in ("nothing", "0" * 65, "a\nb"):
        refused(client.get_object, "InvalidArgument", **at, VersionId=invalid)
        refused(client.delete_object, "InvalidArgument", **at, VersionId=invalid)
    refused(client.delete_bucket, "BucketNotEmpty", Bucket="kept")
    listed = client.list_object_versions(Bucket="kept")
    assert [(version["VersionId"], version["IsLatest"]) for version in listed["DeleteMarkers"]] == [
        (marker["VersionId"], True)
    ]
    versions = [version["VersionId"] for version in listed["Versions"]]
    assert versions == [copied["VersionId"], second, first, "null"]
    upload = client.create_multipart_upload(**at)["UploadId"]
    part = client.upload_part(**at, UploadId=upload, PartNumber=1, Body=b"parts")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    uploaded = client.complete_multipart_upload(**at, UploadId=upload, MultipartUpload=parts)
    assert _read(client, **at) == _read(client, **at, VersionId=uploaded["VersionId"]) == b"parts"
    pages = client.get_paginator("list_object_versions").paginate(Bucket="kept", PaginationConfig={"PageSize": 2})
    versions_and_markers = [
        {"Key": version["Key"], "VersionId": version["VersionId"]}
        for page in pages
        for version in (*page.get("Versions", ()), *page.get("DeleteMarkers", ()))
    ]
    assert len(versions_and_markers) == 6
    deletions = client.delete_objects(Bucket="kept", Delete={"Objects": versions_and_markers})
    assert len(deletions["Deleted"]) == 6 and "Errors" not in deletions
    client.delete_bucket(Bucket="kept")
    refused(client.put_bucket_versioning, "NoSuchBucket", Bucket="kept", VersioningConfiguration={"Status": "Enabled"})


def test_deletions_have_conditions(client: Any) -> None:
    """A deletion of something else than its client has seen was carried out, or refused as a whole."""
    client.create_bucket(Bucket="watched")
    at = {"Bucket": "watched", "Key": "k"}
    etag = client.put_object(**at, Body=b"bytes")["ETag"]
    modified = client.head_object(**at)["LastModified"]
    refused(client.delete_object, "PreconditionFailed", **at, IfMatchSize=4)
    refused(client.delete_object, "PreconditionFailed", **at, IfMatch='"0"')
    item = {"Key": "k", "ETag": etag, "Size": 5, "LastModifiedTime": modified}
    failed = client.delete_objects(Bucket="watched", Delete={"Objects": [item | {"Size": 4}]})
    assert [error["Code"] for error in failed["Errors"]] == ["PreconditionFailed"]
    odd = [{"Key": "k" * 2000}, {"Key": "k", "Size": 10**18}, {"Key": "k", "VersionId": "x y"}]
    failed = client.delete_objects(Bucket="watched", Delete={"Objects": odd})
    codes = [error["Code"] for error in failed["Errors"]]
    assert codes == ["KeyTooLongError", "PreconditionFailed", "InvalidArgument"]
    assert client.delete_objects(Bucket="watched", Delete={"Objects": [item]})["Deleted"]
    assert client.delete_object(**at, IfMatch=etag)["ResponseMetadata"]["HTTPStatusCode"] == 204, (
        "as after a lost answer"
    )
    refused(client.head_object, "404", **at)


def test_tags(client: Any) -> None:
    client.create_bucket(Bucket="tagged")
    at, tags = {"Bucket": "tagged", "Key": "k"}, [{"Key": "colour", "Value": "red & blue"}]
    client.put_object(**at, Body=b"k", Tagging="colour=red%20%26%20blue")
    assert client.get_object_tagging(**at)["TagSet"] == tags
    assert client.get_object(**at)["ResponseMetadata"]["HTTPHeaders"]["x-amz-tagging-count"] == "1"
    client.copy_object(Bucket="tagged", Key="copy", CopySource=at)
    client.copy_object(Bucket="tagged", Key="other", CopySource=at, TaggingDirective="REPLACE", Tagging="a=1")
    assert client.get_object_tagging(Bucket="tagged", Key="copy")["TagSet"] == tags
    assert client.get_object_tagging(Bucket="tagged", Key="other")["TagSet"] == [{"Key": "a", "Value": "1"}]
    client.put_object_tagging(**at, Tagging={"TagSet": [{"Key": "b", "Value": ""}]})
    assert client.get_object_tagging(**at)["TagSet"] == [{"Key": "b", "Value": ""}]
    assert _read(client, **at) == b"k"
    client.delete_object_tagging(**at)
    assert client.get_object_tagging(**at)["TagSet"] == []
    refused(client.put_object, "InvalidTag", **at, Body=b"", Tagging="&".join(f"{number}=" for number in range(11)))
    refused(client.get_object_tagging, "NoSuchKey", Bucket="tagged", Key="absent")
    refused(client.get_bucket_tagging, "NoSuchTagSet", Bucket="tagged")
    client.put_bucket_tagging(Bucket="tagged", Tagging={"TagSet": tags})
    assert client.get_bucket_tagging(Bucket="tagged")["TagSet"] == tags
    client.delete_bucket_tagging(Bucket="tagged")
    refused(client.get_bucket_tagging, "NoSuchTagSet", Bucket="tagged")


def test_parts_of_an_object_can_be_read(client: Any) -> None:
    """`partNumber` answered with the whole object. A copy is one part, with checksums of its own bytes."""
    client.create_bucket(Bucket="parted")
    at, bodies = {"Bucket": "parted", "Key": "k"}, {1: b"a" * _PART_BYTES, 3: b"b" * 1000}
    upload = client.create_multipart_upload(**at, ChecksumAlgorithm="SHA256")["UploadId"]
    parts = []
    for number, body in bodies.items():
        part = client.upload_part(**at, UploadId=upload, PartNumber=number, Body=body, ChecksumAlgorithm="SHA256")
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    uploaded = client.complete_multipart_upload(**at, UploadId=upload, MultipartUpload={"Parts": parts})
    for number, body in bodies.items():
        read = client.get_object(**at, PartNumber=number)
        assert (read["Body"].read(), read["PartsCount"]) == (body, 2)
        assert client.head_object(**at, PartNumber=number)["ContentLength"] == len(body)
    refused(client.get_object, "InvalidPartNumber", **at, PartNumber=2)
    names = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"]
    attributes = client.get_object_attributes(**at, ObjectAttributes=names)
    assert (attributes["ETag"], attributes["ObjectSize"]) == (uploaded["ETag"].strip('"'), _PART_BYTES + 1000)
    assert attributes["Checksum"]["ChecksumType"] == "COMPOSITE"
    assert attributes["ObjectParts"]["TotalPartsCount"] == 2
    assert [(part["PartNumber"], part["Size"]) for part in attributes["ObjectParts"]["Parts"]] == [
        (1, _PART_BYTES),
        (3, 1000),
    ]
    client.copy_object(Bucket="parted", Key="copy", CopySource=at)
    content = b"".join(bodies.values())
    copy = client.head_object(Bucket="parted", Key="copy", ChecksumMode="ENABLED")
    assert copy["ETag"].strip('"') == hashlib.md5(content, usedforsecurity=False).hexdigest()
    assert copy["ChecksumType"] == "FULL_OBJECT" and copy["ContentLength"] == len(content)
    at_once = client.put_object(Bucket="parted", Key="again", Body=content, ChecksumAlgorithm="SHA256")
    assert copy["ChecksumSHA256"] == at_once["ChecksumSHA256"]
    refused(client.get_object, "InvalidPartNumber", Bucket="parted", Key="copy", PartNumber=2)
    upload = client.create_multipart_upload(**at)["UploadId"]
    parts = [
        {"PartNumber": number, "ETag": client.upload_part(**at, UploadId=upload, PartNumber=number, Body=body)["ETag"]}
        for number, body in ((1, bodies[1]), (2, b""))
    ]
    client.complete_multipart_upload(**at, UploadId=upload, MultipartUpload={"Parts": parts})
    assert _read(client, **at, PartNumber=2) == b"", "not all of it"
    refused(client.get_object_attributes, "InvalidArgument", **at, ObjectAttributes=["Colour"])


def test_browsers(client: Any, place: Place) -> None:
    client.create_bucket(Bucket="shown")
    at = {"Bucket": "shown", "Key": "k"}
    client.put_object(**at, Body=b"bytes")
    refused(client.get_bucket_cors, "NoSuchCORSConfiguration", Bucket="shown")
    rule = {
        "AllowedOrigins": [_ORIGIN],
        "AllowedMethods": ["GET", "PUT"],
        "AllowedHeaders": ["content-type"],
        "ExposeHeaders": ["ETag"],
        "MaxAgeSeconds": 60,
    }
    client.put_bucket_cors(Bucket="shown", CORSConfiguration={"CORSRules": [rule]})
    assert client.get_bucket_cors(Bucket="shown")["CORSRules"] == [rule]
    get = client.generate_presigned_url("get_object", Params=at)
    read = _ask("GET", get, headers={"Origin": _ORIGIN})
    assert (read.content, read.headers["access-control-allow-origin"]) == (b"bytes", _ORIGIN)
    assert read.headers["access-control-expose-headers"] == "ETag"
    foreign = _ask("GET", get, headers={"Origin": "https://other.example"})
    assert foreign.status_code == 200 and "access-control-allow-origin" not in foreign.headers
    put = client.generate_presigned_url("put_object", Params=at)
    asks = {"Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "Content-Type"}
    allowed = _ask("OPTIONS", put, headers=asks | {"Origin": _ORIGIN})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-headers"] == "content-type"
    assert (allowed.headers["access-control-allow-methods"], allowed.headers["access-control-max-age"]) == (
        "GET, PUT",
        "60",
    )
    for headers in (
        asks | {"Origin": "https://other.example"},
        asks | {"Origin": _ORIGIN, "Access-Control-Request-Method": "DELETE"},
        asks | {"Origin": _ORIGIN, "Access-Control-Request-Headers": "content-type, x-amz-meta-colour"},
        {"Origin": _ORIGIN},
    ):
        assert _ask("OPTIONS", put, headers=headers).status_code == 403
    absent = _ask(
        "GET", client.generate_presigned_url("get_object", Params=at | {"Key": "absent"}), headers={"Origin": _ORIGIN}
    )
    assert (absent.status_code, absent.headers["access-control-allow-origin"]) == (404, _ORIGIN)
    client.delete_bucket_cors(Bucket="shown")
    assert _ask("OPTIONS", put, headers=asks | {"Origin": _ORIGIN}).status_code == 403


def test_a_browser_learns_nothing_of_the_buckets_of_others(client: Any, place: Place) -> None:
    """A preflight without a signature identifies no bucket: every name has the same answer."""
    client.create_bucket(Bucket="secret")
    rule = {"AllowedOrigins": [_ORIGIN], "AllowedMethods": ["PUT"], "AllowedHeaders": ["*"]}
    client.put_bucket_cors(Bucket="secret", CORSConfiguration={"CORSRules": [rule]})
    asks = {"Access-Control-Request-Method": "GET", "Origin": "https://other.example"}
    answers = [_ask("OPTIONS", f"{place.http}/{bucket}/k", headers=asks) for bucket in ("secret", "nobodys")]
    cors_headers = [{name: value for name, value in answer.headers.items() if "access" in name} for answer in answers]
    assert [answer.status_code for answer in answers] == [200, 200] and cors_headers[0] == cors_headers[1]

    def from_elsewhere(request: Any, **_: Any) -> None:
        request.headers["Origin"] = "https://other.example"

    client.put_object(Bucket="secret", Key="k", Body=b"")
    stranger = boto(place, tls=False)
    stranger.meta.events.register("before-send.s3.PutObject", from_elsewhere)
    refused(stranger.put_object, "AccessForbidden", Bucket="secret", Key="k", Body=b"changed")
    assert _read(client, Bucket="secret", Key="k") == b"", "what it asked for was not done"


def test_lifecycles_are_kept(client: Any) -> None:
    client.create_bucket(Bucket="expiring")
    refused(client.get_bucket_lifecycle_configuration, "NoSuchLifecycleConfiguration", Bucket="expiring")
    rules = [
        {
            "ID": "logs",
            "Filter": {"And": {"Prefix": "logs/", "Tags": [{"Key": "a", "Value": "1"}]}},
            "Status": "Enabled",
            "Expiration": {"Days": 7},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 3, "NewerNoncurrentVersions": 2},
        },
        {
            "ID": "uploads",
            "Filter": {"Prefix": ""},
            "Status": "Enabled",
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        },
    ]
    client.put_bucket_lifecycle_configuration(Bucket="expiring", LifecycleConfiguration={"Rules": rules})
    assert client.get_bucket_lifecycle_configuration(Bucket="expiring")["Rules"] == rules
    transition = {"ID": "m", "Filter": {}, "Status": "Enabled", "Transitions": [{"Days": 1, "StorageClass": "GLACIER"}]}
    refused(
        client.put_bucket_lifecycle_configuration,
        "NotImplemented",
        Bucket="expiring",
        LifecycleConfiguration={"Rules": [transition]},
    )
    assert client.get_bucket_lifecycle_configuration(Bucket="expiring")["Rules"] == rules
    client.delete_bucket_lifecycle(Bucket="expiring")
    refused(client.get_bucket_lifecycle_configuration, "NoSuchLifecycleConfiguration", Bucket="expiring")


def test_encryption_is_promised_only_where_the_operator_says_so(client: Any, tmp_path_factory: Any) -> None:
    client.create_bucket(Bucket="plain")
    refused(client.put_object, "NotImplemented", Bucket="plain", Key="k", Body=b"", ServerSideEncryption="AES256")
    refused(client.get_bucket_encryption, "NotImplemented", Bucket="plain")
    with s3_place(tmp_path_factory.mktemp("s3e"), QUIRE_GATEWAY_S3_ENCRYPTED="1") as sealed_place:
        sealed = boto(sealed_place, tls=False)
        sealed.create_bucket(Bucket="sealed")
        at = {"Bucket": "sealed", "Key": "k"}
        assert sealed.put_object(**at, Body=b"k", ServerSideEncryption="AES256")["ServerSideEncryption"] == "AES256"
        assert sealed.get_object(**at)["ServerSideEncryption"] == "AES256"
        rules = sealed.get_bucket_encryption(Bucket="sealed")["ServerSideEncryptionConfiguration"]["Rules"]
        assert rules[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
        refused(sealed.put_object, "NotImplemented", **at, Body=b"", ServerSideEncryption="aws:kms")
        key = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "0" * 32}
        refused(sealed.put_object, "NotImplemented", **at, Body=b"", **key)
