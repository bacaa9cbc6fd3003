"""Multipart uploads and odd requests of boto3: checksums, listings, keys, signatures."""

from __future__ import annotations

import html
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.e2e.s3_place import Place, boto, refused, s3_place

_PART_BYTES = 5 << 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with s3_place(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("CRC32", "COMPOSITE"), ("CRC32", "FULL_OBJECT"), ("CRC64NVME", "FULL_OBJECT"), ("SHA256", "COMPOSITE")],
)
def test_checksums_of_parts_are_kept_and_compared(place: Place, algorithm: str, kind: str) -> None:
    """Checksums in a CompleteMultipartUpload were ignored, and no object of parts had one."""
    client = boto(place, tls=False)
    client.create_bucket(Bucket="summed")
    at, name = {"Bucket": "summed", "Key": f"{algorithm}-{kind}"}, f"Checksum{algorithm}"
    created = client.create_multipart_upload(**at, ChecksumAlgorithm=algorithm, ChecksumType=kind)
    assert (created["ChecksumAlgorithm"], created["ChecksumType"]) == (algorithm, kind)
    upload, bodies = {**at, "UploadId": created["UploadId"]}, (b"a" * _PART_BYTES, b"b" * 70_000)
    parts = []
    for number, body in enumerate(bodies, 1):
        part = client.upload_part(**upload, PartNumber=number, Body=body, ChecksumAlgorithm=algorithm)
        parts.append({"PartNumber": number, "ETag": part["ETag"], name: part[name]})
    listed = client.list_parts(**upload)
    assert (listed["ChecksumAlgorithm"], listed["ChecksumType"]) == (algorithm, kind)
    assert [part[name] for part in listed["Parts"]] == [part[name] for part in parts]
    refused(client.upload_part, "InvalidRequest", **upload, PartNumber=3, Body=b"c", ChecksumAlgorithm="SHA1")
    swapped = [parts[0], parts[1] | {name: parts[0][name]}]
    refused(client.complete_multipart_upload, "InvalidPart", **upload, MultipartUpload={"Parts": swapped})
    completion = {"MultipartUpload": {"Parts": parts}}
    refused(client.complete_multipart_upload, "BadDigest", **upload, **completion, **{name: parts[0][name]})
    kinds = {"COMPOSITE", "FULL_OBJECT"} - {kind}
    refused(client.complete_multipart_upload, "InvalidRequest", **upload, **completion, ChecksumType=min(kinds))
    done = client.complete_multipart_upload(**upload, **completion, ChecksumType=kind)
    read = client.get_object(**at, ChecksumMode="ENABLED")
    assert read["Body"].read() == b"".join(bodies)
    assert (read["ChecksumType"], read[name]) == (done["ChecksumType"], done[name]) and done["ChecksumType"] == kind
    if kind == "FULL_OBJECT":
        put = client.put_object(Bucket="summed", Key="at once", Body=b"".join(bodies), ChecksumAlgorithm=algorithm)
        assert put[name] == done[name], "that of the bytes, by boto3"
    else:
        assert done[name].endswith("-2")
    repeated = client.complete_multipart_upload(**upload, **completion)
    assert (repeated["ETag"], repeated[name]) == (done["ETag"], done[name])


def test_uploads_are_listed_by_common_prefixes(place: Place) -> None:
    client = boto(place, tls=False)
    client.create_bucket(Bucket="grouped")
    keys = ("a", "b/1", "b/2", "b/c/3", "c", "d/4")
    for key in keys:
        client.create_multipart_upload(Bucket="grouped", Key=key)
    for page_size in (1, 2, 10):
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket="grouped", Delimiter="/", PaginationConfig={"PageSize": page_size}
        )
        listed = [(page.get("Uploads", []), page.get("CommonPrefixes", [])) for page in pages]
        assert [upload["Key"] for uploads, _ in listed for upload in uploads] == ["a", "c"]
        assert [prefix["Prefix"] for _, prefixes in listed for prefix in prefixes] == ["b/", "d/"]
    below = client.list_multipart_uploads(Bucket="grouped", Prefix="b/", Delimiter="/")
    assert [upload["Key"] for upload in below["Uploads"]] == ["b/1", "b/2"]
    assert below["CommonPrefixes"] == [{"Prefix": "b/c/"}] and below["Delimiter"] == "/"


def test_names_and_headers_are_taken_as_they_are(place: Place) -> None:
    """Keys that look like a version, or have control characters; encodings of content with spaces."""
    client = boto(place, tls=False)
    client.create_bucket(Bucket="odd")
    client.put_object(Bucket="odd", Key="a?versionId=5", Body=b"odd", ContentEncoding="deflate, gzip")
    client.copy_object(Bucket="odd", Key="copy", CopySource={"Bucket": "odd", "Key": "a?versionId=5"})
    assert client.head_object(Bucket="odd", Key="copy")["ContentEncoding"] == "deflate, gzip"
    keys = ["tab\there", "bell\x07", "\x01\x1f", "plain"]
    for key in keys:
        client.put_object(Bucket="odd", Key=key, Body=b"")
    deleted = client.delete_objects(Bucket="odd", Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True})
    assert "Errors" not in deleted
    contents = client.list_objects_v2(Bucket="odd")["Contents"]
    assert [entry["Key"] for entry in contents] == ["a?versionId=5", "copy"]


def test_signatures_of_version_2_are_told_the_cure(place: Place) -> None:
    """boto3 presigns by Version 2 in us-east-1 by default."""
    client, at = boto(place, tls=False), {"Bucket": "signed", "Key": "k"}
    client.create_bucket(Bucket="signed")
    client.put_object(**at, Body=b"signed")
    presigned = client.generate_presigned_url("get_object", Params=at)
    assert "AWSAccessKeyId=" in presigned
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(presigned)
    assert failed.value.code == 400
    assert 'signature_version="s3v4"' in html.unescape(failed.value.read().decode())
    client = boto(place, tls=False, signature_version="s3v4")
    with urllib.request.urlopen(client.generate_presigned_url("get_object", Params=at)) as answer:
        assert answer.read() == b"signed"


def test_parts_without_checksums_get_those_of_the_upload(place: Place) -> None:
    """Parts are copied, or sent without a checksum."""
    client = boto(place, tls=False, request_checksum_calculation="when_required")
    client.create_bucket(Bucket="silent")
    client.put_object(Bucket="silent", Key="source", Body=b"s" * _PART_BYTES)
    at = {"Bucket": "silent", "Key": "k"}
    created = client.create_multipart_upload(**at, ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT")
    upload = {**at, "UploadId": created["UploadId"]}
    copied = client.upload_part_copy(**upload, PartNumber=1, CopySource={"Bucket": "silent", "Key": "source"})
    sent = client.upload_part(**upload, PartNumber=2, Body=b"end")
    parts = [
        {"PartNumber": number, "ETag": part["ETag"]} for number, part in enumerate((copied["CopyPartResult"], sent), 1)
    ]
    assert copied["CopyPartResult"]["ChecksumCRC32C"] and sent["ChecksumCRC32C"]
    done = client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    put = client.put_object(Bucket="silent", Key="put", Body=b"s" * _PART_BYTES + b"end", ChecksumAlgorithm="CRC32C")
    assert done["ChecksumCRC32C"] == put["ChecksumCRC32C"]
