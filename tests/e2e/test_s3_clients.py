"""Ordinary S3 clients at the S3 frontend, none of which knows what is behind it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import boto3
import obstore
import pytest
import s3fs
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from obstore.store import S3Store
from yarl import URL

from tests.e2e.s3_place import Place, boto, refused, s3_place

MANY = 2500
LARGE = 64 << 20
HARD_KEY = "a dir/ü+&=%25?'\"~.txt"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with s3_place(tmp_path_factory.mktemp("s3")) as endpoint:
        client = boto(endpoint, tls=False)
        client.create_bucket(Bucket="many")
        with ThreadPoolExecutor(8) as threads:

            def put(key: str) -> Any:
                return client.put_object(Bucket="many", Key=key, Body=b"x")

            list(threads.map(put, _many()))
        yield endpoint


def _many() -> list[str]:
    return [f"{number % 5}/{number:05}" for number in range(MANY)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("large") / "large"
    path.write_bytes(os.urandom(LARGE))
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("checksum", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_boto3_checksums(place: Place, tls: bool, checksum: str) -> None:
    """In a header over http, in a trailer of a chunked body over https; kept, and given back."""
    client, bucket = boto(place, tls), f"sums-{checksum.lower()}-{tls:d}"
    client.create_bucket(Bucket=bucket)
    body = os.urandom(100_000)
    put = client.put_object(Bucket=bucket, Key="a", Body=body, ChecksumAlgorithm=checksum)
    got = client.get_object(Bucket=bucket, Key="a", ChecksumMode="ENABLED")
    assert got["Body"].read() == body
    assert got[f"Checksum{checksum}"] == put[f"Checksum{checksum}"]
    with pytest.raises(client.exceptions.ClientError) as failed:
        client.put_object(Bucket=bucket, Key="b", Body=body, ChecksumSHA256="A" * 43 + "=")
    assert failed.value.response["Error"]["Code"] in ("BadDigest", "InvalidRequest")
    with pytest.raises(client.exceptions.ClientError) as failed:
        client.head_object(Bucket=bucket, Key="b")
    assert failed.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_boto3(place: Place, tls: bool, large: Path, tmp_path: Path) -> None:
    client, bucket = boto(place, tls), f"boto-{tls:d}"
    client.create_bucket(Bucket=bucket)
    body = os.urandom(3000)
    client.put_object(Bucket=bucket, Key=HARD_KEY, Body=body, Metadata={"mark": "ü?"[1:]}, ContentType="text/x")
    got = client.get_object(Bucket=bucket, Key=HARD_KEY)
    assert (got["Body"].read(), got["ContentType"], got["Metadata"]) == (body, "text/x", {"mark": "?"})
    assert got["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    for wanted, expected in (("bytes=0-9", body[:10]), ("bytes=2990-", body[2990:]), ("bytes=-7", body[-7:])):
        assert client.get_object(Bucket=bucket, Key=HARD_KEY, Range=wanted)["Body"].read() == expected
    for wanted in ("bytes=3000-", "bytes=-0"):
        refused(client.get_object, "InvalidRange", Bucket=bucket, Key=HARD_KEY, Range=wanted)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="many", PaginationConfig={"PageSize": 700})
    assert [each["Key"] for page in pages for each in page["Contents"]] == sorted(_many())
    folders = client.list_objects_v2(Bucket="many", Delimiter="/", MaxKeys=3)
    assert [each["Prefix"] for each in folders["CommonPrefixes"]] == ["0/", "1/", "2/"]
    rest = client.list_objects_v2(Bucket="many", Delimiter="/", ContinuationToken=folders["NextContinuationToken"])
    assert [each["Prefix"] for each in rest["CommonPrefixes"]] == ["3/", "4/"]
    assert len(client.list_object_versions(Bucket="many", Prefix="2/")["Versions"]) == 500

    config = TransferConfig(multipart_threshold=8 << 20, multipart_chunksize=8 << 20)
    client.upload_file(str(large), bucket, "large", Config=config)
    client.download_file(bucket, "large", str(tmp_path / "back"), Config=config)
    assert _digest(tmp_path / "back") == _digest(large)
    assert client.head_object(Bucket=bucket, Key="large")["ETag"].endswith('-8"')
    client.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": "large"})
    assert client.head_object(Bucket=bucket, Key="copy")["ContentLength"] == LARGE

    refused(client.get_object, "AccessDenied", Bucket="quire-latents", Key="x")
    chunk = client.get_object(Bucket="quire-kv", Key=place.chunk_key)["Body"].read()
    assert chunk[: len(place.chunk)] == place.chunk
    refused(client.delete_bucket, "BucketNotEmpty", Bucket=bucket)
    deleted = client.delete_objects(
        Bucket=bucket, Delete={"Objects": [{"Key": key} for key in (HARD_KEY, "large", "copy", "never")]}
    )
    assert len(deleted["Deleted"]) == 4 and "Errors" not in deleted
    client.delete_bucket(Bucket=bucket)
    refused(client.list_objects_v2, "NoSuchBucket", Bucket=bucket)


def test_conditions_and_multipart(place: Place) -> None:
    client = boto(place, tls=False)
    client.create_bucket(Bucket="conditions")
    at = {"Bucket": "conditions", "Key": "k"}
    etag = client.put_object(**at, Body=b"one", IfNoneMatch="*")["ETag"]
    refused(client.put_object, "PreconditionFailed", **at, Body=b"two", IfNoneMatch="*")
    refused(client.put_object, "PreconditionFailed", **at, Body=b"two", IfMatch='"nonsense"')
    refused(client.get_object, "PreconditionFailed", **at, IfMatch='"nonsense"')
    refused(client.get_object, "304", **at, IfNoneMatch=etag)
    client.put_object(**at, Body=b"two", IfMatch=etag)
    with ThreadPoolExecutor(8) as threads:

        def race(number: int) -> str:
            try:
                client.put_object(Bucket="conditions", Key="raced", Body=str(number).encode(), IfNoneMatch="*")
            except client.exceptions.ClientError as error:
                return str(error.response["Error"]["Code"])
            return "won"

        outcomes = list(threads.map(race, range(8)))
    assert outcomes.count("won") == 1
    assert set(outcomes) <= {"won", "PreconditionFailed", "ConditionalRequestConflict"}
    winner = client.get_object(Bucket="conditions", Key="raced")["Body"].read()
    assert winner == str(outcomes.index("won")).encode()

    upload = {
        "Bucket": "conditions",
        "Key": "m",
        "UploadId": client.create_multipart_upload(Bucket="conditions", Key="m")["UploadId"],
    }
    refused(
        client.complete_multipart_upload,
        "InvalidPart",
        **upload,
        MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": "x"}]},
    )
    tags = {number: client.upload_part(**upload, PartNumber=number, Body=b"z" * 100)["ETag"] for number in (1, 2)}
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in tags.items()]
    refused(client.complete_multipart_upload, "EntityTooSmall", **upload, MultipartUpload={"Parts": parts})
    refused(client.complete_multipart_upload, "InvalidPartOrder", **upload, MultipartUpload={"Parts": parts[::-1]})
    assert [part["PartNumber"] for part in client.list_parts(**upload)["Parts"]] == [1, 2]
    assert len(client.list_multipart_uploads(Bucket="conditions")["Uploads"]) == 1
    others = [client.create_multipart_upload(Bucket="conditions", Key=f"more/{at // 2}")["UploadId"] for at in range(5)]
    listing, by_two = client.get_paginator("list_multipart_uploads"), {"PageSize": 2}
    pages = listing.paginate(Bucket="conditions", Prefix="more/", PaginationConfig=by_two)
    listed = [each for page in pages for each in page["Uploads"]]
    assert {each["UploadId"] for each in listed} == set(others) and len(listed) == 5
    for each in listed:
        client.abort_multipart_upload(Bucket="conditions", Key=each["Key"], UploadId=each["UploadId"])
    client.upload_part_copy(
        **upload, PartNumber=3, CopySource={"Bucket": "many", "Key": _many()[0]}, CopySourceRange="bytes=0-0"
    )
    refused(client.delete_bucket, "BucketNotEmpty", Bucket="conditions")
    client.abort_multipart_upload(**upload)
    refused(client.list_parts, "NoSuchUpload", **upload)
    refused(client.get_object_torrent, "NotImplemented", **at)
    assert client.get_bucket_location(Bucket="conditions")["LocationConstraint"] is None


def test_as_other_servers_do_it(place: Place) -> None:
    """Where clients rely on what AWS, Ceph and MinIO do."""
    client = boto(place, tls=False)
    client.create_bucket(Bucket="others")
    client.create_bucket(Bucket="others")  # in us-east-1 one's own bucket can be created again
    assert client.get_bucket_location(Bucket="others")["LocationConstraint"] is None
    for name in ("a.-b", "a-.b", "a..b"):
        refused(client.create_bucket, "InvalidBucketName", Bucket=name)

    at = {"Bucket": "others", "Key": "k"}
    etag = client.put_object(**at, Body=b"one")["ETag"]
    refused(client.put_object, "PreconditionFailed", **at, Body=b"two", IfNoneMatch=etag)
    client.put_object(**at, Body=b"two", IfNoneMatch='"another"')
    assert client.get_object(**at)["Body"].read() == b"two"

    upload = {**at, "UploadId": client.create_multipart_upload(**at)["UploadId"]}
    client.upload_part(**upload, PartNumber=2, Body=b"last")
    client.upload_part(**upload, PartNumber=1, Body=b"z" * (5 << 20))
    parts = {number: client.upload_part(**upload, PartNumber=number, Body=body)["ETag"] for number, body in _AGAIN}
    source = {"Bucket": "many", "Key": _many()[0]}
    for span in ("bytes=0-1", "bytes=1-1", "bytes=0-", "bytes=-1", "0-0"):
        copied = {"PartNumber": 3, "CopySource": source, "CopySourceRange": span}
        refused(client.upload_part_copy, "InvalidArgument", **upload, **copied)
    chosen = [{"PartNumber": number, "ETag": parts[number]} for number in sorted(parts)]
    done = [client.complete_multipart_upload(**upload, MultipartUpload={"Parts": chosen})["ETag"] for _ in range(2)]
    assert done[0] == done[1]
    assert client.get_object(**at)["Body"].read() == b"a" * (5 << 20) + b"again"

    client.put_object_acl(**at, ACL="private")
    client.put_bucket_acl(Bucket="others", ACL="private")
    for policy in (client.get_object_acl(**at), client.get_bucket_acl(Bucket="others")):
        assert policy["Grants"] == [
            {"Grantee": policy["Owner"] | {"Type": "CanonicalUser"}, "Permission": "FULL_CONTROL"}
        ]
    client.put_object(**at, Body=b"three", ACL="private")
    refused(client.put_object, "NotImplemented", **at, Body=b"four", ACL="public-read")
    refused(client.put_object_acl, "NotImplemented", **at, ACL="public-read")
    refused(client.put_bucket_acl, "NotImplemented", Bucket="others", GrantRead="id=1")

    odd = ["\n", "a b", "a%20b", "ü/+", "<&>"]
    for key in odd:
        client.put_object(Bucket="others", Key=key, Body=b"x")
    client.delete_object(**at)
    found, token = [], ""
    while True:
        more = {"ContinuationToken": token} if token else {}
        page = client.list_objects_v2(Bucket="others", MaxKeys=2, EncodingType="url", **more)
        assert page.get("ContinuationToken", "") == token
        found += [each["Key"] for each in page["Contents"]]
        if not page["IsTruncated"]:
            break
        token = page["NextContinuationToken"]
    assert found == [quote(key, safe="/-_.~*") for key in sorted(odd, key=str.encode)]
    for key in odd:
        listed = client.list_objects_v2(Bucket="others", Prefix=key)
        assert (listed["Prefix"], [each["Key"] for each in listed["Contents"]]) == (key, [key])
        assert [each["Key"] for each in client.list_objects(Bucket="others", Prefix=key)["Contents"]] == [key]
        client.delete_objects(Bucket="others", Delete={"Objects": [{"Key": key}]})
    client.create_multipart_upload(Bucket="others", Key="never finished")
    client.delete_bucket(Bucket="others")
    refused(client.list_objects_v2, "NoSuchBucket", Bucket="others")


_AGAIN = ((1, b"first"), (2, b"again"), (1, b"a" * (5 << 20)))


async def test_presigned_urls_out_of_their_time(place: Place) -> None:
    client = boto(place, tls=False, signature_version="s3v4")
    url = client.generate_presigned_url("get_object", Params={"Bucket": "many", "Key": _many()[0]}, ExpiresIn=300)
    async with aiohttp.ClientSession() as session:

        async def answer(asked: str) -> tuple[int, str]:
            async with session.get(URL(asked, encoded=True)) as got:
                return got.status, await got.text()

        assert await answer(url) == (200, "x")
        for expires in ("0", "-5", "604801", "soon", ""):
            status, text = await answer(url.replace("X-Amz-Expires=300", f"X-Amz-Expires={expires}"))
            assert (status, "AccessDenied" in text) == (403, True), expires
        status, text = await answer(f"{place.http}/never/there")
        assert (status, "AccessDenied" in text) == (403, True)


async def test_obstore(place: Place, large: Path) -> None:
    def store(bucket: str) -> S3Store:
        return S3Store(
            bucket,
            endpoint=place.http,
            access_key_id=place.key,
            secret_access_key=place.secret,
            region="us-east-1",
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
        )

    boto(place, tls=False).create_bucket(Bucket="obstore")
    mine = store("obstore")
    await obstore.put_async(mine, "a/b.txt", b"0123456789")
    assert bytes(await obstore.get_range_async(mine, "a/b.txt", start=2, end=5)) == b"234"
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        await obstore.put_async(mine, "a/b.txt", b"other", mode="create")
    await obstore.put_async(mine, "large", large, chunk_size=8 << 20)
    back = await (await obstore.get_async(mine, "large")).bytes_async()
    assert hashlib.sha256(back).hexdigest() == _digest(large)
    found = [each["path"] async for page in obstore.list(store("many")) for each in page]
    assert found == sorted(_many())
    chunk = await (await obstore.get_async(store("quire-kv"), place.chunk_key)).bytes_async()
    assert bytes(chunk)[: len(place.chunk)] == place.chunk
    await obstore.delete_async(mine, ["a/b.txt", "large"])
    assert [page async for page in obstore.list(mine)] in ([], [[]])


def test_s3fs(place: Place, large: Path, tmp_path: Path) -> None:
    files = s3fs.S3FileSystem(
        key=place.key,
        secret=place.secret,
        endpoint_url=place.https,
        client_kwargs={"region_name": "us-east-1", "verify": str(place.ca)},
    )
    files.mkdir("s3fs-bucket")
    with files.open("s3fs-bucket/a.txt", "wb") as file:
        file.write(b"0123456789")
    assert files.cat_file("s3fs-bucket/a.txt", start=3, end=6) == b"345"
    files.put(str(large), "s3fs-bucket/large")
    files.get("s3fs-bucket/large", str(tmp_path / "back"))
    assert _digest(tmp_path / "back") == _digest(large)
    assert len(files.find("many")) == MANY
    assert files.cat(f"quire-kv/{place.chunk_key}")[: len(place.chunk)] == place.chunk
    files.rm("s3fs-bucket", recursive=True)
    assert not files.exists("s3fs-bucket")


def _environment(place: Place) -> dict[str, str]:
    return os.environ | {
        "AWS_ACCESS_KEY_ID": place.key,
        "AWS_SECRET_ACCESS_KEY": place.secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CA_BUNDLE": str(place.ca),
        "RCLONE_CONFIG_Q_TYPE": "s3",
        "RCLONE_CONFIG_Q_PROVIDER": "Other",
        "RCLONE_CONFIG_Q_ENDPOINT": place.http,
        "RCLONE_CONFIG_Q_ENV_AUTH": "true",
    }


def _run(place: Place, *command: str | Path) -> str:
    environment = _environment(place)
    if command[0] == "rclone":
        del environment["AWS_CA_BUNDLE"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("aws") is None, reason="the aws command line is not installed")
def test_aws_command_line(place: Place, large: Path, tmp_path: Path) -> None:
    s3 = ("aws", "--endpoint-url", place.https)
    _run(place, *s3, "s3", "mb", "s3://aws-cli")
    _run(place, *s3, "s3", "cp", large, "s3://aws-cli/large")
    _run(place, *s3, "s3", "cp", "s3://aws-cli/large", tmp_path / "back")
    assert _digest(tmp_path / "back") == _digest(large)
    api = (*s3, "s3api")
    _run(place, *api, "get-object", "--bucket", "aws-cli", "--key", "large", "--range", "bytes=5-8", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == large.read_bytes()[5:9]
    assert len(_run(place, *s3, "s3", "ls", "--recursive", "s3://many").splitlines()) == MANY
    _run(place, *s3, "s3", "cp", f"s3://quire-kv/{place.chunk_key}", tmp_path / "chunk")
    assert (tmp_path / "chunk").read_bytes()[: len(place.chunk)] == place.chunk
    _run(place, *s3, "s3", "rb", "--force", "s3://aws-cli")


@pytest.mark.skipif(shutil.which("rclone") is None, reason="rclone is not installed")
def test_rclone(place: Place, large: Path, tmp_path: Path) -> None:
    _run(place, "rclone", "mkdir", "q:rclone-bucket")
    _run(
        place,
        "rclone",
        "copyto",
        large,
        "q:rclone-bucket/a b/large",
        "--s3-upload-cutoff",
        "8M",
        "--s3-chunk-size",
        "8M",
    )
    _run(place, "rclone", "copyto", "q:rclone-bucket/a b/large", tmp_path / "back")
    assert _digest(tmp_path / "back") == _digest(large)
    (tmp_path / "small").write_bytes(b"0123456789")
    _run(place, "rclone", "copyto", tmp_path / "small", "q:rclone-bucket/small")
    assert _run(place, "rclone", "cat", "--offset", "3", "--count", "4", "q:rclone-bucket/small") == "3456"
    summed = _run(place, "rclone", "md5sum", "q:rclone-bucket/small")
    assert summed.split()[0] == hashlib.md5(b"0123456789").hexdigest()
    assert len(_run(place, "rclone", "lsf", "-R", "--files-only", "q:many").splitlines()) == MANY
    _run(place, "rclone", "copyto", f"q:quire-kv/{place.chunk_key}", tmp_path / "chunk")
    assert (tmp_path / "chunk").read_bytes()[: len(place.chunk)] == place.chunk
    _run(place, "rclone", "purge", "q:rclone-bucket")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_with_presigned_urls(place: Place, large: Path, tmp_path: Path) -> None:
    client = boto(place, tls=False, signature_version="s3v4")
    client.create_bucket(Bucket="curl")

    def signed(method: str, **parameters: str) -> str:
        return str(client.generate_presigned_url(method, Params=parameters, ExpiresIn=300))

    at = {"Bucket": "curl", "Key": HARD_KEY}
    # curl asks with Expect: 100-continue before it sends so much.
    _run(place, "curl", "-sSf", "-T", large, signed("put_object", **at))
    _run(place, "curl", "-sSf", "-o", tmp_path / "back", signed("get_object", **at))
    assert _digest(tmp_path / "back") == _digest(large)
    part = subprocess.run(["curl", "-sSf", "-r", "5-8", signed("get_object", **at)], capture_output=True, check=True)
    assert part.stdout == large.read_bytes()[5:9]
    listed = _run(place, "curl", "-sSf", signed("list_objects_v2", Bucket="many"))
    assert listed.count("<Key>") == 1000 and "<IsTruncated>true" in listed
    chunk = subprocess.run(
        ["curl", "-sSf", signed("get_object", Bucket="quire-kv", Key=place.chunk_key)], capture_output=True, check=True
    )
    assert chunk.stdout[: len(place.chunk)] == place.chunk
    _run(place, "curl", "-sSf", "-X", "DELETE", signed("delete_object", **at))
    url = signed("get_object", **at)
    gone = subprocess.run(["curl", "-s", "-w", "%{http_code}", url], capture_output=True, text=True, check=True)
    assert "<Code>NoSuchKey</Code>" in gone.stdout and gone.stdout.endswith("404")
    forged = subprocess.run(
        ["curl", "-s", url.replace("Signature=", "Signature=0")[:-1]], capture_output=True, text=True, check=True
    )
    assert "<Code>" in forged.stdout
    host = place.http.replace("127.0.0.1", "many.localhost")
    virtual = boto3.client(
        "s3",
        endpoint_url=host.replace("many.", ""),
        aws_access_key_id=place.key,
        aws_secret_access_key=place.secret,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "virtual"}, signature_version="s3v4"),
    ).generate_presigned_url("get_object", Params={"Bucket": "many", "Key": _many()[0]})
    assert "many.localhost" in virtual
    port = place.http.rpartition(":")[2]
    assert _run(place, "curl", "-sSf", "--resolve", f"many.localhost:{port}:127.0.0.1", virtual) == "x"
