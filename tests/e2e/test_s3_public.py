"""Buckets that anyone may read: by a name with the tenant, where owner and operator allow it, and nothing more."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.e2e.s3_place import Place, boto, refused, s3_place

_ORIGIN = "https://app.example"
_NONE: Mapping[str, str] = {}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with s3_place(tmp_path_factory.mktemp("s3"), QUIRE_GATEWAY_S3_PUBLIC="1") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def client(place: Place) -> Any:
    """The owner's, with a public bucket and a private one."""
    client = boto(place, tls=False, signature_version="s3v4")
    client.create_bucket(Bucket="open", ACL="public-read")
    client.create_bucket(Bucket="closed")
    for bucket in ("open", "closed"):
        client.put_object(Bucket=bucket, Key="a/b c.txt", Body=b"hello", ContentType="text/plain")
    return client


def _lower(headers: Any) -> Mapping[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _ask(url: str, method: str = "GET", headers: Mapping[str, str] = _NONE) -> tuple[int, bytes, Mapping[str, str]]:
    data = b"<x/>" if method in ("PUT", "POST") else None
    request = urllib.request.Request(url, data, dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read(), _lower(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), _lower(error.headers)


def test_anyone_reads_and_lists_a_public_bucket(place: Place, client: Any) -> None:
    at = f"{place.http}/alice:open"
    status, body, headers = _ask(f"{at}/a/b%20c.txt", headers={"Range": "bytes=1-3"})
    assert (status, body, headers["content-type"]) == (206, b"ell", "text/plain")
    assert _ask(f"{at}/a/b%20c.txt", "HEAD")[0] == _ask(at, "HEAD")[0] == 200
    for listing in ("", "?list-type=2&prefix=a/"):
        status, body, _ = _ask(at + listing)
        assert status == 200 and b"<Key>a/b c.txt</Key>" in body
    assert _ask(f"{at}/missing")[0] == 404
    assert _ask(f"{place.http}/alice%3Aopen/a/b%20c.txt")[1] == b"hello", "as clients that encode the colon ask"
    grants = client.get_bucket_acl(Bucket="open")["Grants"]
    assert [(grant["Grantee"]["Type"], grant["Permission"]) for grant in grants] == [
        ("CanonicalUser", "FULL_CONTROL"),
        ("Group", "READ"),
    ]
    assert len(client.get_bucket_acl(Bucket="closed")["Grants"]) == 1


_OTHERS = [
    ("GET", "?versions"),
    ("GET", "?acl"),
    ("GET", "?cors"),
    ("GET", "?versioning"),
    ("GET", "?uploads"),
    ("GET", "/a/b%20c.txt?versionId=null"),
    ("GET", "/a/b%20c.txt?tagging"),
    ("GET", "/a/b%20c.txt?attributes"),
    ("PUT", ""),
    ("PUT", "?acl"),
    ("PUT", "/new"),
    ("POST", "?delete"),
    ("POST", "/new?uploads"),
    ("DELETE", "/a/b%20c.txt"),
    ("DELETE", ""),
]


@pytest.mark.parametrize(("method", "target"), _OTHERS)
def test_anyone_does_nothing_else(place: Place, client: Any, method: str, target: str) -> None:
    status, body, _ = _ask(f"{place.http}/alice:open{target}", method)
    assert status == 403 and b"AccessDenied" in body
    assert client.get_object(Bucket="open", Key="a/b c.txt")["Body"].read() == b"hello"


@pytest.mark.parametrize(
    "name", ["alice:closed", "alice:none", "bob:open", "quire:quire-kv", "alice:quire-latents", "a:"]
)
def test_private_and_missing_buckets_look_alike(place: Place, client: Any, name: str) -> None:
    for target in (f"{name}/a/b%20c.txt", name):
        status, body, _ = _ask(f"{place.http}/{target}")
        assert status == 403 and b"<Code>AccessDenied</Code><Message>Access Denied</Message>" in body
    assert _ask(f"{place.http}/open/a/b%20c.txt")[0] == 403, "without a tenant the name is nobody's"


def test_a_bucket_is_public_until_its_owner_says_otherwise(place: Place, client: Any) -> None:
    client.create_bucket(Bucket="shared")
    at = f"{place.http}/alice:shared"
    assert _ask(at)[0] == 403
    client.put_bucket_acl(Bucket="shared", ACL="public-read")
    assert _ask(at)[0] == 200
    client.put_bucket_acl(Bucket="shared", ACL="private")
    assert _ask(at)[0] == 403
    client.put_bucket_acl(Bucket="shared", ACL="public-read")
    client.create_bucket(Bucket="shared")
    assert _ask(at)[0] == 403, "as in us-east-1 of AWS, a bucket that is made again has the ACL of that request"
    client.create_bucket(Bucket="shared", ACL="public-read")
    assert _ask(at)[0] == 200
    client.delete_bucket(Bucket="shared")
    client.create_bucket(Bucket="shared")
    assert _ask(at)[0] == 403, "a new bucket is private, whatever was there before"


def test_other_acls_are_refused(client: Any) -> None:
    for acl in ("public-read-write", "authenticated-read"):
        refused(client.put_bucket_acl, "NotImplemented", Bucket="open", ACL=acl)
    at = {"Bucket": "open", "Key": "a/b c.txt"}
    refused(client.put_object_acl, "NotImplemented", **at, ACL="public-read")
    refused(client.put_object, "NotImplemented", **at, ACL="public-read", Body=b"")
    refused(client.put_bucket_acl, "NotImplemented", Bucket="open", ACL="public-read", GrantRead="id=1")


def test_strangers_choose_no_headers(place: Place, client: Any) -> None:
    """A link that shows a stored text as a page of scripts would be anyone's to make."""
    for parameter in ("response-content-type=text/html", "response-content-disposition=inline"):
        status, body, _ = _ask(f"{place.http}/alice:open/a/b%20c.txt?{parameter}")
        assert status == 400 and b"InvalidRequest" in body


def test_a_signed_request_names_no_tenant(place: Place, client: Any) -> None:
    url = client.generate_presigned_url("get_object", Params={"Bucket": "open", "Key": "a/b c.txt"})
    status, body, _ = _ask(url.replace("/open/", "/alice:open/"))
    assert status == 400 and b"without a signature" in body


def test_pages_of_other_origins_read_as_the_buckets_rules_say(place: Place, client: Any) -> None:
    rule = {"AllowedOrigins": [_ORIGIN], "AllowedMethods": ["GET"]}
    client.put_bucket_cors(Bucket="open", CORSConfiguration={"CORSRules": [rule]})
    at = f"{place.http}/alice:open/a/b%20c.txt"
    asked = {"Origin": _ORIGIN, "Access-Control-Request-Method": "GET"}
    assert _ask(at, "OPTIONS", asked)[0] == 200
    assert _ask(at, "OPTIONS", asked | {"Origin": "https://other.example"})[0] == 403
    assert _ask(at.replace("open", "closed"), "OPTIONS", asked)[0] == 403
    assert _ask(at, headers={"Origin": _ORIGIN})[2]["access-control-allow-origin"] == _ORIGIN
    assert "access-control-allow-origin" not in _ask(at, headers={"Origin": "https://other.example"})[2]
