"""Signature Version 4 against the worked examples of AWS's documents, and against what forgers try."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_gateway.core.aws_chunked import AwsChunked, Signing
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.sigv4 import EMPTY_SHA256, Request, read_claim, signing_key, verify

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
SCOPE = "20130524/us-east-1/s3/aws4_request"
NOW_S = 1369353600.0  # 2013-05-24T00:00:00Z
HOST = ("host", "examplebucket.s3.amazonaws.com")


def signed(method: str, path: str, query: str, headers: dict[str, str], signature: str) -> Request:
    """With an Authorization header that names all of `headers`."""
    headers = dict([HOST]) | headers | {"x-amz-date": "20130524T000000Z"}
    names = ";".join(sorted(headers))
    claim = f"AWS4-HMAC-SHA256 Credential={KEY}/{SCOPE},SignedHeaders={names},Signature={signature}"
    return Request(method, path, query, [*headers.items(), ("authorization", claim)])


# AWS, "Signature Calculations for the Authorization Header: Transferring Payload in a Single Chunk".
EXAMPLES = {
    "get": signed(
        "GET",
        "/test.txt",
        "",
        {"range": "bytes=0-9", "x-amz-content-sha256": EMPTY_SHA256},
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
    "put": signed(
        "PUT",
        "/test%24file.text",
        "",
        {
            "date": "Fri, 24 May 2013 00:00:00 GMT",
            "x-amz-content-sha256": "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
            "x-amz-storage-class": "REDUCED_REDUNDANCY",
        },
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    ),
    "lifecycle": signed(
        "GET",
        "/",
        "lifecycle",
        {"x-amz-content-sha256": EMPTY_SHA256},
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
    ),
    "list": signed(
        "GET",
        "/",
        "max-keys=2&prefix=J",
        {"x-amz-content-sha256": EMPTY_SHA256},
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
}
# AWS, "Authenticating Requests: Using Query Parameters".
PRESIGNED = Request(
    "GET",
    "/test.txt",
    f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={KEY}%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
    "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404",
    [HOST],
)


def _verify(request: Request, now_s: float = NOW_S, secret: str = SECRET) -> bytes:
    claim = read_claim(request)
    assert claim is not None
    assert claim.access_key == KEY
    return verify(request, claim, secret, now_s)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documents_examples(name: str) -> None:
    assert _verify(EXAMPLES[name]) == signing_key(SECRET, SCOPE)


def test_a_presigned_url_and_its_time() -> None:
    _verify(PRESIGNED)
    _verify(PRESIGNED, NOW_S + 86400)
    for now_s in (NOW_S + 86401, NOW_S - 901):
        with pytest.raises(S3Error) as failed:
            _verify(PRESIGNED, now_s)
        assert failed.value.code == "AccessDenied"
    for expires in ("604801", "0", "-1", "soon"):
        with pytest.raises(S3Error) as failed:
            _verify(replace(PRESIGNED, query=PRESIGNED.query.replace("86400", expires)))
        assert (failed.value.code, failed.value.status) == ("AccessDenied", 403)


def _code(request: Request, now_s: float = NOW_S, secret: str = SECRET) -> str:
    with pytest.raises(S3Error) as failed:
        _verify(request, now_s, secret)
    return failed.value.code


def test_whatever_is_changed_is_noticed() -> None:
    request = EXAMPLES["list"]
    assert _code(replace(request, method="PUT")) == "SignatureDoesNotMatch"
    assert _code(replace(request, path="/x")) == "SignatureDoesNotMatch"
    assert _code(replace(request, query="max-keys=2&prefix=K")) == "SignatureDoesNotMatch"
    assert _code(replace(request, query="max-keys=2&prefix=J&x=")) == "SignatureDoesNotMatch"
    assert _code(request, secret="another") == "SignatureDoesNotMatch"
    assert _code(request, NOW_S + 901) == "RequestTimeTooSkewed"
    smuggled = replace(request, headers=[*request.headers, ("x-amz-acl", "public-read")])
    assert _code(smuggled) == "AccessDenied"
    twice = replace(request, headers=[*request.headers, ("x-amz-content-sha256", EMPTY_SHA256)])
    assert _code(twice) == "SignatureDoesNotMatch"
    both = replace(PRESIGNED, headers=[*PRESIGNED.headers, request.headers[-1]])
    with pytest.raises(S3Error):
        read_claim(both)


def test_the_query_may_come_in_any_order_and_encoding() -> None:
    request = EXAMPLES["list"]
    _verify(replace(request, query="prefix=%4A&max-keys=2"))
    _verify(replace(EXAMPLES["put"], path="/test$file.text"))


@pytest.mark.parametrize(
    "authorization",
    [
        "AWS4-HMAC-SHA256 nonsense",
        f"AWS4-HMAC-SHA256 Credential={KEY}/20130524/eu/ec2/aws4_request,SignedHeaders=host,Signature={'0' * 64}",
        f"AWS4-HMAC-SHA256 Credential={KEY}/20130525/us-east-1/s3/aws4_request,SignedHeaders=host,Signature={'0' * 64}",
        f"AWS4-HMAC-SHA256 Credential={KEY},SignedHeaders=host,Signature={'0' * 64}",
    ],
)
def test_malformed_headers(authorization: str) -> None:
    headers = [("authorization", authorization), ("x-amz-date", "20130524T000000Z"), HOST]
    with pytest.raises(S3Error) as failed:
        read_claim(Request("GET", "/", "", headers))
    assert failed.value.code == "AuthorizationHeaderMalformed"


# AWS, "Signature Calculations for the Authorization Header: Transferring Payload in Multiple Chunks".
CHUNKED_SEED = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
CHUNKS = [
    (65536, "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648"),
    (1024, "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497"),
    (0, "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9"),
]
# The same, "... (Chunked Upload) with trailing headers".
TRAILER_SEED = "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
TRAILER_CHUNKS = [
    (65536, "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2"),
    (1024, "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7"),
    (0, "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992"),
]
TRAILER = (
    b"x-amz-checksum-crc32c:sOO8/Q==\r\n"
    b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n"
)


def seed(mode: str, signature: str, trailer: str = "") -> Request:
    headers = {
        "content-encoding": "aws-chunked",
        "content-length": "66824",
        "x-amz-content-sha256": mode,
        "x-amz-decoded-content-length": "66560",
        "x-amz-storage-class": "REDUCED_REDUNDANCY",
    }
    if trailer:
        del headers["content-length"]
        headers["x-amz-trailer"] = trailer
    headers = {"host": "s3.amazonaws.com"} | headers | {"x-amz-date": "20130524T000000Z"}
    names = ";".join(sorted(headers))
    claim = f"AWS4-HMAC-SHA256 Credential={KEY}/{SCOPE},SignedHeaders={names},Signature={signature}"
    return Request("PUT", "/examplebucket/chunkObject.txt", "", [*headers.items(), ("authorization", claim)])


def framed(chunks: list[tuple[int, str]], trailer: bytes = b"") -> bytes:
    parts = [f"{size:x};chunk-signature={signature}\r\n".encode() for size, signature in chunks]
    bodies = [b"a" * size + b"\r\n" if size else trailer + b"\r\n" for size, _ in chunks]
    return b"".join(head + body for head, body in zip(parts, bodies, strict=True))


def decoder(mode: str, signature: str) -> AwsChunked:
    request = seed(mode, signature, "x-amz-checksum-crc32c" if mode.endswith("TRAILER") else "")
    claim = read_claim(request)
    assert claim is not None
    return AwsChunked(mode, Signing(verify(request, claim, SECRET, NOW_S), claim))


@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_chunked_examples(step: int) -> None:
    for mode, start, chunks, trailer in (
        ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", CHUNKED_SEED, CHUNKS, b""),
        ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", TRAILER_SEED, TRAILER_CHUNKS, TRAILER),
    ):
        body, decoding = framed(chunks, trailer), decoder(mode, start)
        out = b"".join(
            bytes(piece) for at in range(0, len(body), step) for piece in decoding.feed(body[at : at + step])
        )
        decoding.finish()
        assert out == b"a" * 66560
        assert decoding.trailers == ({"x-amz-checksum-crc32c": "sOO8/Q=="} if trailer else {})


@pytest.mark.parametrize("at", [100, 65536 + 90, 66560 + 300])
def test_a_changed_byte_in_a_signed_body_is_noticed(at: int) -> None:
    body = bytearray(framed(TRAILER_CHUNKS, TRAILER))
    body[at] ^= 1
    decoding = decoder("STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", TRAILER_SEED)
    with pytest.raises(S3Error):
        for _ in decoding.feed(bytes(body)):
            pass
        decoding.finish()


def test_chunks_that_are_left_out_are_noticed() -> None:
    decoding = decoder("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", CHUNKED_SEED)
    with pytest.raises(S3Error):
        list(decoding.feed(framed([CHUNKS[0], CHUNKS[2]])))
    short = decoder("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", CHUNKED_SEED)
    list(short.feed(framed(CHUNKS[:2])))
    with pytest.raises(S3Error) as failed:
        short.finish()
    assert failed.value.code == "IncompleteBody"


def test_unsigned_chunks_with_a_trailer() -> None:
    decoding = AwsChunked("STREAMING-UNSIGNED-PAYLOAD-TRAILER", None)
    body = b"2000\r\n" + b"h" * 8192 + b"\r\n1\r\n!\r\n0\r\nx-amz-checksum-crc32:abc=\r\n\r\n"
    assert b"".join(map(bytes, decoding.feed(body))) == b"h" * 8192 + b"!"
    decoding.finish()
    assert decoding.trailers == {"x-amz-checksum-crc32": "abc="}
    for bad in (
        b"5;x\r\n",
        b"zz\r\n",
        b"5\r\nhellothere\r\n",
        b"-1\r\n",
        b"0\r\nnocolon\r\n\r\n",
        b"x" * 5000,
        body + b"1",
    ):
        with pytest.raises(S3Error):
            decoding = AwsChunked("STREAMING-UNSIGNED-PAYLOAD-TRAILER", None)
            list(decoding.feed(bad))
            decoding.finish()
    with pytest.raises(S3Error) as failed:
        AwsChunked("STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD", None)
    assert failed.value.code == "NotImplemented"


def test_only_the_last_chunk_may_be_small() -> None:
    """As AWS has it: a body in chunks of one byte cost hundreds of times its size."""
    decoding = AwsChunked("STREAMING-UNSIGNED-PAYLOAD-TRAILER", None)
    with pytest.raises(S3Error) as failed:
        list(decoding.feed(b"1\r\nX\r\n" * 2))
    assert failed.value.code == "InvalidChunkSizeError"
    assert decoding.decoded_bytes == 1
