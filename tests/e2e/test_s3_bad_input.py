"""What the S3 frontend answers to those who may not, to nonsense, and to clients that are slow or go away."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import botocore.session
import pytest
from yarl import URL

from quire_gateway.core.s3_operations import COPIES, OPERATIONS
from quire_server.redis import AccessKeys, S3Buckets, connect
from quire_server.redis.keys.access import AccessGrant, AccessLevel
from quire_tools.local import LocalCluster

from .s3_signing import presigned, request, signed

Key = tuple[str, str]


@dataclass(frozen=True)
class Scene:
    url: str
    cluster: LocalCluster
    alice: Key
    bob: Key
    reader: Key
    guest: Key


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder: Path = tmp_path_factory.mktemp("s3bad")
    with LocalCluster(folder, arena_bytes=64 << 20, drive_bytes=128 << 20) as cluster:

        async def keys() -> list[Key]:
            redis = connect(cluster.redis_url)
            made = AccessKeys(redis, cluster.secret.encode())
            found = [
                await made.create("alice"),
                await made.create("bob"),
                await made.create("alice", read_only=True),
                await made.create("guest", (AccessGrant("alice", "shared", "in/", AccessLevel.WRITE),)),
            ]
            await redis.aclose()
            return [(key.name, made.secret(key)) for key in found]

        yield Scene(f"http://{cluster.s3_address}", cluster, *asyncio.run(keys()))


def _code(body: bytes) -> str:
    assert b"Traceback" not in body
    return body.partition(b"<Code>")[2].partition(b"</Code>")[0].decode()


async def test_tenants_see_nothing_of_each_other(scene: Scene) -> None:
    """The same name is another bucket for another tenant: no listing, no error, no conflict tells of it."""
    url = f"{scene.url}/mine"
    assert (await request("PUT", url, scene.alice))[0] == 200
    assert (await request("PUT", f"{url}/secret", scene.alice, body=b"alice's"))[0] == 200
    for method, path in (("GET", ""), ("HEAD", ""), ("GET", "/secret"), ("DELETE", ""), ("PUT", "/x")):
        theirs = await request(method, url + path, scene.bob)
        never = await request(method, f"{scene.url}/never{path}", scene.bob)
        assert (theirs[0], _code(theirs[2])) == (never[0], _code(never[2])) == (404, _code(never[2]))
    assert b"mine" not in (await request("GET", f"{scene.url}/", scene.bob))[2]
    assert (await request("PUT", url, scene.bob))[0] == 200
    assert (await request("GET", f"{url}/secret", scene.bob))[0] == 404
    copied = await request("PUT", f"{url}/x", scene.bob, {"x-amz-copy-source": "/mine/secret"})
    assert _code(copied[2]) == "NoSuchKey"
    assert (await request("GET", f"{url}/secret", scene.alice))[2] == b"alice's"


async def test_grants(scene: Scene) -> None:
    shared = f"{scene.url}/shared"
    assert (await request("PUT", shared, scene.alice))[0] == 200
    assert (await request("PUT", f"{shared}/in/a", scene.guest, body=b"1"))[0] == 200
    assert (await request("GET", f"{shared}/in/a", scene.alice))[2] == b"1"
    assert (await request("GET", f"{shared}?prefix=in%2F", scene.guest))[0] == 200
    for method, path in (("PUT", "/out"), ("GET", "/out"), ("GET", ""), ("GET", "?prefix=i"), ("DELETE", "")):
        assert _code((await request(method, shared + path, scene.guest))[2]) == "AccessDenied", path
    wanted = "".join(f"<Object><Key>{key}</Key></Object>" for key in ("in/a", "out"))
    body = f"<Delete>{wanted}</Delete>".encode()
    headers = {"Content-MD5": base64.b64encode(hashlib.md5(body).digest()).decode()}
    deleted = (await request("POST", f"{shared}?delete", scene.guest, headers, body))[2]
    assert deleted.count(b"<Deleted>") == 1 and deleted.count(b"AccessDenied") == 1
    assert (await request("GET", shared, scene.reader))[0] == 200
    assert _code((await request("PUT", f"{shared}/x", scene.reader, body=b"1"))[2]) == "AccessDenied"


async def test_keys_that_are_wrong_deleted_or_rotated(scene: Scene) -> None:
    assert _code((await request("GET", f"{scene.url}/", ("QKNOBODY", "x")))[2]) == "InvalidAccessKeyId"
    assert _code((await request("GET", f"{scene.url}/", (scene.alice[0], "x")))[2]) == "SignatureDoesNotMatch"
    redis = connect(scene.cluster.redis_url)
    keys = AccessKeys(redis, scene.cluster.secret.encode())
    made = await keys.create("carol")
    key = (made.name, keys.secret(made))
    assert (await request("GET", f"{scene.url}/", key))[0] == 200
    rotated = await keys.rotate(made.name)
    assert rotated is not None
    await asyncio.sleep(2.1)
    assert _code((await request("GET", f"{scene.url}/", key))[2]) == "SignatureDoesNotMatch"
    assert (await request("GET", f"{scene.url}/", (made.name, keys.secret(rotated))))[0] == 200
    await keys.delete(made.name)
    await asyncio.sleep(2.1)
    assert _code((await request("GET", f"{scene.url}/", key))[2]) == "InvalidAccessKeyId"
    raw = b"".join([await redis.dump(name) or b"" for name in await redis.keys("quire:s3:*")])
    assert scene.alice[1].encode() not in raw, "no secret lies in Redis"
    await redis.aclose()


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "code"),
    [
        ("PUT", "/UPPER", {}, b"", "InvalidBucketName"),
        ("PUT", "/quire-kv", {}, b"", "BucketAlreadyExists"),
        ("GET", "/bad?list-type=2&max-keys=-1", {}, b"", "InvalidArgument"),
        ("GET", "/bad?list-type=2&continuation-token=%21", {}, b"", "InvalidArgument"),
        ("GET", "/bad?encoding-type=utf", {}, b"", "InvalidArgument"),
        ("PUT", "/bad?acl", {"x-amz-acl": "public-read"}, b"", "NotImplemented"),
        ("PUT", "/bad?acl", {}, b"<AccessControlPolicy/>", "NotImplemented"),
        ("PUT", "/bad?acl", {}, b"", "InvalidRequest"),
        ("GET", "/bad/never?acl", {}, b"", "NoSuchKey"),
        ("PATCH", "/bad/a", {}, b"", "MethodNotAllowed"),
        ("OPTIONS", "/bad/a", {"Origin": "https://a.example"}, b"", "AccessForbidden"),
        ("GET", "/bad/here?attributes", {}, b"", "InvalidArgument"),
        ("GET", "/bad/here?attributes", {"x-amz-max-parts": "many"}, b"", "InvalidArgument"),
        ("PUT", "/bad?versioning", {}, b"<VersioningConfiguration/>", "MalformedXML"),
        ("PUT", "/bad?lifecycle", {}, b"<LifecycleConfiguration/>", "MalformedXML"),
        ("PUT", "/bad?cors", {}, b"", "MalformedXML"),
        ("PUT", "/bad?tagging", {}, b"<Tagging><Tag/></Tagging>", "NotImplemented"),
        ("PUT", "/bad/here?tagging", {}, b"<Tagging", "MalformedXML"),
        ("PUT", "/bad/a", {"x-amz-tagging": "a=1&a=2"}, b"a", "InvalidTag"),
        ("DELETE", "/bad/here", {"x-amz-if-match-size": "many"}, b"", "InvalidArgument"),
        ("DELETE", "/bad/here", {"x-amz-if-match-size": "9" * 5000}, b"", "InvalidArgument"),
        ("DELETE", "/bad/here", {"x-amz-if-match-last-modified-time": "soon"}, b"", "InvalidArgument"),
        (
            "DELETE",
            "/bad/here",
            {"x-amz-if-match-last-modified-time": "Mon, 01 Jan 2020 00:00:00 +99999999999999999999"},
            b"",
            "InvalidArgument",
        ),
        ("DELETE", "/bad/here?versionId=a%0Db", {}, b"", "InvalidArgument"),
        ("GET", "/bad?versions&version-id-marker=7", {}, b"", "InvalidArgument"),
        ("POST", "/bad", {"Content-Type": "multipart/form-data; boundary=x"}, b"--x--", "NotImplemented"),
        ("PUT", "/bad/a", {"x-amz-copy-source": "bad/here?versionId=7"}, b"", "NoSuchVersion"),
        ("POST", "/bad?delete", {}, b"<Delete><Object>", "MalformedXML"),
        ("POST", "/bad?delete", {}, b"<Delete></Delete>", "MalformedXML"),
        ("POST", "/bad?delete", {}, b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]><Delete>&a;</Delete>", "MalformedXML"),
        ("POST", "/bad?delete", {}, b"x" * (2 << 20), "EntityTooLarge"),
        ("PUT", "/bad/a", {"Content-MD5": "x"}, b"a", "InvalidDigest"),
        ("PUT", "/bad/a", {"Content-MD5": ""}, b"a", "InvalidDigest"),
        ("PUT", "/bad/a", {"Content-MD5": "AAAAAAAAAAAAAAAAAAAAAA=="}, b"a", "BadDigest"),
        ("PUT", "/bad/a", {"x-amz-checksum-crc32": "AAAAAA=="}, b"a", "BadDigest"),
        ("PUT", "/bad/a", {"x-amz-checksum-crc99": "AAAAAA=="}, b"a", "InvalidRequest"),
        ("PUT", "/bad/a", {"x-amz-meta-a": "x" * 3000}, b"a", "MetadataTooLarge"),
        ("PUT", "/bad/a", {"cache-control": "x" * 3000}, b"a", "MetadataTooLarge"),
        ("POST", "/bad/a?uploads", {"content-disposition": "x" * 3000}, b"", "MetadataTooLarge"),
        ("PUT", "/bad/" + "k" * 1025, {}, b"a", "KeyTooLongError"),
        ("PUT", "/bad/%FF%FE", {}, b"a", "InvalidURI"),
        ("PUT", "/bad/a?partNumber=0&uploadId=x", {}, b"a", "InvalidArgument"),
        ("PUT", "/bad/a?partNumber=1&uploadId=x", {}, b"a", "NoSuchUpload"),
        ("POST", "/bad/a?uploadId=x", {}, b"<CompleteMultipartUpload/>", "MalformedXML"),
        ("PUT", "/bad/a", {"x-amz-copy-source": "nonsense"}, b"", "InvalidArgument"),
        ("PUT", "/bad/here", {"If-None-Match": '"827ccb0eea8a706c4c34a16891f84e7b"'}, b"a", "PreconditionFailed"),
        ("GET", "/bad/never", {}, b"", "NoSuchKey"),
        ("GET", "/bad/here", {"Range": "bytes=5-"}, b"", "InvalidRange"),
        ("GET", "/bad/here?response-content-type=a%0D%0Ab", {}, b"", "InvalidArgument"),
        (
            "POST",
            "/bad/a?uploadId=x",
            {},
            b"<CompleteMultipartUpload><Part><PartNumber>"
            + b"1" * 5000
            + b"</PartNumber><ETag>x</ETag></Part></CompleteMultipartUpload>",
            "MalformedXML",
        ),
        ("PUT", "/nobucket/a", {}, b"a", "NoSuchBucket"),
    ],
)
async def test_nonsense(scene: Scene, method: str, path: str, headers: dict[str, str], body: bytes, code: str) -> None:
    """The error that AWS documents, as XML with a request id; never a 500."""
    await request("PUT", f"{scene.url}/bad", scene.alice)
    await request("PUT", f"{scene.url}/bad/here", scene.alice, body=b"12345")
    status, answered, raw = await request(method, scene.url + path, scene.alice, headers, body)
    assert _code(raw) == code, raw
    assert status < 500 or status == 501
    assert f"<RequestId>{answered['x-amz-request-id']}".encode() in raw


_SAME = {"ListDirectoryBuckets", "WriteGetObjectResponse", "GetBucketLifecycle", "PutBucketLifecycle"}
"""Requests that others have, too: sent to another host, or as the model had them before."""


def _not_here() -> Iterator[tuple[str, str]]:
    """Method and target of each operation of S3's model that this frontend has not."""
    model = botocore.session.get_session().get_service_model("s3")
    names = {operation.name for operation in (*OPERATIONS, *COPIES)}
    for name in sorted(set(model.operation_names) - names - _SAME):
        http = model.operation_model(name).http
        yield http["method"], http["requestUri"].replace("{Bucket}", "kept").replace("{Key+}", "a")


async def test_an_operation_that_is_not_here_changes_nothing(scene: Scene) -> None:
    """Neither the bucket nor the object that it names, though its method would delete or replace them."""
    await request("PUT", f"{scene.url}/kept", scene.alice)
    await request("PUT", f"{scene.url}/kept/a", scene.alice, body=b"12345")
    for method, target in _not_here():
        status, _, raw = await request(method, scene.url + target, scene.alice)
        assert status in (405, 501), f"{method} {target}: {status} {raw!r}"
    listed = (await request("GET", f"{scene.url}/kept", scene.alice))[2]
    assert listed.count(b"<Key>") == 1
    assert (await request("GET", f"{scene.url}/kept/a", scene.alice))[2] == b"12345"


@pytest.mark.parametrize(
    ("method", "headers", "body"),
    [
        ("PUT", {"x-amz-write-offset-bytes": "5"}, b"more"),
        ("PUT", {"x-amz-server-side-encryption-customer-algorithm": "AES256"}, b"secret"),
        ("PUT", {"x-amz-object-lock-legal-hold": "ON"}, b"held"),
        ("DELETE", {"x-amz-mfa": "1 2"}, b""),
    ],
)
async def test_a_header_that_is_not_here_changes_nothing(
    scene: Scene, method: str, headers: dict[str, str], body: bytes
) -> None:
    await request("PUT", f"{scene.url}/headers", scene.alice)
    await request("PUT", f"{scene.url}/headers/a", scene.alice, body=b"12345")
    status, _, raw = await request(method, f"{scene.url}/headers/a", scene.alice, headers, body)
    assert (status, _code(raw)) == (501, "NotImplemented")
    assert (await request("GET", f"{scene.url}/headers/a", scene.alice))[2] == b"12345"


async def test_conditions_of_a_delete_in_a_list_are_not_passed_over(scene: Scene) -> None:
    await request("PUT", f"{scene.url}/listed", scene.alice)
    await request("PUT", f"{scene.url}/listed/a", scene.alice, body=b"12345")
    body = b"<Delete><Object><Key>a</Key><ETag>other</ETag></Object></Delete>"
    headers = {"Content-MD5": base64.b64encode(hashlib.md5(body).digest()).decode()}
    assert (await request("POST", f"{scene.url}/listed?delete", scene.alice, headers, body))[2].count(
        b"<Code>PreconditionFailed</Code>"
    )
    assert (await request("GET", f"{scene.url}/listed/a", scene.alice))[0] == 200


async def test_a_key_with_nul_in_a_list_costs_itself_only(scene: Scene) -> None:
    """Such a key would sort among the versions of another key."""
    await request("PUT", f"{scene.url}/listed", scene.alice)
    await request("PUT", f"{scene.url}/listed/a", scene.alice, body=b"12345")
    body = b"<Delete><Object><Key>a&#0;&#1;</Key></Object><Object><Key>a</Key></Object></Delete>"
    headers = {"Content-MD5": base64.b64encode(hashlib.md5(body).digest()).decode()}
    status, _, raw = await request("POST", f"{scene.url}/listed?delete", scene.alice, headers, body)
    assert status == 200 and raw.count(b"<Code>InvalidURI</Code>") == 1 and raw.count(b"<Deleted>") == 1
    assert (await request("GET", f"{scene.url}/listed/a", scene.alice))[0] == 404


async def test_the_owner_that_a_client_expects_is_compared(scene: Scene) -> None:
    await request("PUT", f"{scene.url}/owned", scene.alice)
    await request("PUT", f"{scene.url}/owned/a", scene.alice, body=b"12345")
    for owner, status in (("alice", 200), ("bob", 403)):
        expected = {"x-amz-expected-bucket-owner": owner}
        assert (await request("GET", f"{scene.url}/owned/a", scene.alice, expected))[0] == status
        assert (await request("GET", f"{scene.url}/owned", scene.alice, expected))[0] == status
        source = {"x-amz-copy-source": "owned/a", "x-amz-source-expected-bucket-owner": owner}
        assert (await request("PUT", f"{scene.url}/owned/b", scene.alice, source))[0] == status


async def test_the_size_that_a_client_expects_of_an_upload_is_compared(scene: Scene) -> None:
    await request("PUT", f"{scene.url}/uploads", scene.alice)
    started = (await request("POST", f"{scene.url}/uploads/a?uploads", scene.alice))[2]
    (upload,) = re.findall(rb"<UploadId>(.*?)</UploadId>", started)
    target = f"{scene.url}/uploads/a?uploadId={upload.decode()}"
    etag = (await request("PUT", f"{target}&partNumber=1", scene.alice, body=b"12345"))[1]["etag"]
    part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
    for size, status in (("4", 400), ("x", 400), ("5", 200)):
        answer = await request("POST", target, scene.alice, {"x-amz-mp-object-size": size}, body)
        assert answer[0] == status, answer


async def test_an_object_is_one_part(scene: Scene) -> None:
    """Clients that read by parts get all of it as the first one, and learn that there is no second."""
    await request("PUT", f"{scene.url}/parts", scene.alice)
    await request("PUT", f"{scene.url}/parts/a", scene.alice, body=b"12345")
    await request("PUT", f"{scene.url}/parts/empty", scene.alice, body=b"")
    status, headers, raw = await request("GET", f"{scene.url}/parts/a?partNumber=1", scene.alice)
    assert (status, headers["content-range"], raw) == (206, "bytes 0-4/5", b"12345")
    status, _, raw = await request("GET", f"{scene.url}/parts/a?partNumber=2", scene.alice)
    assert (status, _code(raw)) == (416, "InvalidPartNumber")
    assert (await request("GET", f"{scene.url}/parts/empty?partNumber=1", scene.alice))[0] == 200
    answer = await request("GET", f"{scene.url}/parts/a?partNumber=1", scene.alice, {"Range": "bytes=0-1"})
    assert (answer[0], _code(answer[2])) == (400, "InvalidRequest")


async def test_a_range_of_an_empty_object_tells_its_size(scene: Scene) -> None:
    await request("PUT", f"{scene.url}/sizes", scene.alice)
    await request("PUT", f"{scene.url}/sizes/empty", scene.alice, body=b"")
    status, headers, raw = await request("GET", f"{scene.url}/sizes/empty", scene.alice, {"Range": "bytes=0-9"})
    assert (status, headers["content-range"]) == (416, "bytes */0")
    assert b"<ActualObjectSize>0</ActualObjectSize>" in raw and b"<RangeRequested>bytes=0-9" in raw


async def test_buckets_are_listed_in_pages(scene: Scene) -> None:
    for name in ("page-a", "page-b", "page-c", "other"):
        await request("PUT", f"{scene.url}/{name}", scene.bob)
    first = (await request("GET", f"{scene.url}/?prefix=page-&max-buckets=2", scene.bob))[2]
    assert re.findall(rb"<Name>(.*?)</Name>", first) == [b"page-a", b"page-b"]
    (token,) = re.findall(rb"<ContinuationToken>(.*?)</ContinuationToken>", first)
    last = (await request("GET", f"{scene.url}/?prefix=page-&continuation-token={token.decode()}", scene.bob))[2]
    assert re.findall(rb"<Name>(.*?)</Name>", last) == [b"page-c"] and b"<ContinuationToken>" not in last


async def _raw(scene: Scene, lines: bytes, wait_s: float = 5.0) -> bytes:
    host, _, port = scene.cluster.s3_address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(lines)
    try:
        async with asyncio.timeout(wait_s):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "lines",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /a/b HTTP/1.1\r\nHost: x\r\nAuthorization: AWS4-HMAC-SHA256 \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nx-amz-meta-a: \xe9\r\nConnection: close\r\n\r\n",
        b"PUT /a/b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close\r\n\r\nabc",
        b"GET /%zz?%zz=%zz&X-Amz-Signature=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_what_is_hardly_http(scene: Scene, lines: bytes) -> None:
    answer = await _raw(scene, lines)
    status = int(answer.split(b" ", 2)[1])
    assert 400 <= status < 500
    assert b"Traceback" not in answer


async def test_presigned_urls_are_for_one_thing(scene: Scene) -> None:
    """Headers that change what a request means must have been signed."""
    assert (await request("PUT", f"{scene.url}/signed", scene.alice))[0] in (200, 409)
    assert (await request("PUT", f"{scene.url}/signed/secret", scene.alice, body=b"secret"))[0] == 200
    url = URL(presigned("PUT", f"{scene.url}/signed/upload", scene.alice), encoded=True)
    async with aiohttp.ClientSession() as session:
        for extra in (
            {"x-amz-copy-source": "/signed/secret"},
            {"x-amz-rdma-token": "ucx1.AAAA"},
            {"x-quire-length": "5"},
            {"x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "x-amz-decoded-content-length": "1"},
        ):
            async with session.put(url, headers=extra, data=b"mine") as answer:
                assert answer.status in (400, 403), extra
        async with session.put(url, data=b"mine") as answer:
            assert answer.status == 200
    assert (await request("GET", f"{scene.url}/signed/upload", scene.alice))[2] == b"mine"


async def test_bodies_are_kept_as_they_come(scene: Scene) -> None:
    """Content-Encoding says what the bytes are; it is not undone here."""
    assert (await request("PUT", f"{scene.url}/encoded", scene.alice))[0] in (200, 409)
    packed = gzip.compress(b"x" * 1000)
    for name, body in (("a", packed), ("b", b"not gzip at all")):
        status, _, raw = await request(
            "PUT", f"{scene.url}/encoded/{name}", scene.alice, {"Content-Encoding": "gzip"}, body
        )
        assert status == 200, raw
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        url = URL(presigned("GET", f"{scene.url}/encoded/a", scene.alice), encoded=True)
        async with session.get(url) as answer:
            assert (await answer.read(), answer.headers["Content-Encoding"]) == (packed, "gzip")


async def test_an_answer_that_breaks_off_is_no_answer(scene: Scene) -> None:
    """A blob is gone when half of the object has been sent: the connection ends, nothing else is sent as its bytes."""
    assert (await request("PUT", f"{scene.url}/torn", scene.alice))[0] in (200, 409)
    assert (await request("PUT", f"{scene.url}/torn/a", scene.alice, body=b"y" * ((8 << 20) + 100)))[0] == 200
    folder = scene.cluster.folder / "objects" / "s3"
    (small,) = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size == 100]
    small.unlink()
    with pytest.raises(aiohttp.ClientError):
        await request("GET", f"{scene.url}/torn/a", scene.alice)
    status, _, raw = await request("GET", f"{scene.url}/torn/a", scene.alice, {"Range": "bytes=8388608-"})
    assert status == 503 and b"objects/" not in raw, "no path of ours in it"


async def test_a_body_that_ends_too_soon_leaves_nothing(scene: Scene) -> None:
    """The connection breaks in the middle: no object, and the blob that was started is garbage by and by."""
    assert (await request("PUT", f"{scene.url}/broken", scene.alice))[0] in (200, 409)
    url, body = f"{scene.url}/broken/half", b"x" * (20 << 20)
    headers = signed("PUT", url, scene.alice, {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}, body)
    headers |= {"Host": scene.cluster.s3_address, "Content-Length": str(len(body))}
    head = "PUT /broken/half HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    host, _, port = scene.cluster.s3_address.partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + b"\r\n" + body[: 12 << 20])
    await writer.drain()
    writer.close()
    await asyncio.sleep(0.5)
    assert (await request("HEAD", url, scene.alice))[0] == 404
    redis = connect(scene.cluster.redis_url)
    async with asyncio.timeout(20):  # what was written is known, to be removed
        while not await redis.zrange("quire:s3:{alice/broken}:garbage", 0, -1):
            await asyncio.sleep(0.1)
    await redis.aclose()
    assert (await request("PUT", url, scene.alice, body=b"whole"))[0] == 200


async def test_slow_readers_cost_no_others_anything(scene: Scene) -> None:
    """Twenty connections that ask for 32 MiB and read nothing: others are served, and memory stays bounded."""
    assert (await request("PUT", f"{scene.url}/slow", scene.alice))[0] in (200, 409)
    url = f"{scene.url}/slow/large"
    assert (await request("PUT", url, scene.alice, body=b"z" * (32 << 20)))[0] == 200
    path = presigned("GET", url, scene.alice).removeprefix(scene.url)
    pid = scene.cluster.pid("gateway")
    before = _resident_mib(pid)
    writers = []
    for _ in range(20):
        host, _, port = scene.cluster.s3_address.partition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {scene.cluster.s3_address}\r\n\r\n".encode())
        writers.append(writer)
    await asyncio.sleep(1.0)
    async with asyncio.timeout(10):
        assert (await request("PUT", f"{scene.url}/slow/small", scene.alice, body=b"1"))[0] == 200
    assert _resident_mib(pid) - before < 20 * 2 * 8 + 64, "two pieces a connection"
    for writer in writers:
        writer.close()


def _resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


async def test_a_tenant_has_so_many_buckets(scene: Scene) -> None:
    """A bucket that the tenant has can be created again."""
    redis = connect(scene.cluster.redis_url)
    buckets, keys = S3Buckets(redis), AccessKeys(redis, scene.cluster.secret.encode())
    key = await keys.create("hoarder")
    for number in range(1000):
        await buckets.create("hoarder", f"b{number}", 0.0)
    pair = (key.name, keys.secret(key))
    await redis.aclose()
    status, _, answer = await request("PUT", f"{scene.url}/one-more", pair)
    assert (status, _code(answer)) == (400, "TooManyBuckets")
    status, _, _ = await request("PUT", f"{scene.url}/b999", pair)
    assert status == 200
