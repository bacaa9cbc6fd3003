"""What the S3 door reads from strangers, as functions of bytes. Each may raise its own errors and nothing else.

python -m tests.fuzz.run NAME CORPUS [libFuzzer's options]     coverage-guided, by atheris
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from quire.chunk_object import read_chunk_object
from quire.descriptor import Descriptor, RdmaTarget
from quire.errors import QuireError
from quire.hashing import Namespace
from quire_gateway.core.aws_chunked import MODES, AwsChunked, Signing
from quire_gateway.core.ranges import Conditions, read_range
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.sigv4 import Claim, Request, parameters, read_claim, verify
from quire_gateway.s3 import xml

_CLAIM = Claim("k", "20130524/r/s3/aws4_request", "20130524T000000Z", ("host",), "0" * 64, MODES[0], presigned=False)


def chunked(data: bytes) -> None:
    """Framed bodies, in pieces of every size; what comes out is never more than what came in."""
    if len(data) < 2:
        return
    mode, step, body = MODES[data[0] % len(MODES)], data[1] % 64 + 1, data[2:]
    decoding = AwsChunked(mode, Signing(b"key", _CLAIM) if "HMAC" in mode else None)
    out = 0
    with contextlib.suppress(S3Error):
        for at in range(0, len(body), step):
            for piece in decoding.feed(body[at : at + step]):
                out += len(piece)
        decoding.finish()
    assert out <= len(body)
    assert out == decoding.decoded_bytes


def headers(data: bytes) -> None:
    """Request lines and headers, to the signature."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    path, _, query = lines[0].partition("?")
    pairs = [(name.lower(), value) for name, _, value in (line.partition(":") for line in lines[1:])]
    request = Request("GET", path, query, pairs)
    with contextlib.suppress(S3Error):
        parameters(query)
        claim = read_claim(request)
        if claim is not None:
            verify(request, claim, "secret", 1369353600.0)
            raise AssertionError("a signature was guessed")


def bodies(data: bytes) -> None:
    """XML."""
    for read in (xml.read_delete, xml.read_complete, xml.check_create):
        with contextlib.suppress(S3Error):
            read(data)


def descriptors(data: bytes) -> None:
    """Descriptors, tokens, namespaces, chunks as objects. What is read is written again the same."""
    text = data.decode("latin-1")
    for read in (Descriptor.from_header, RdmaTarget.from_token, Namespace.from_json):
        with contextlib.suppress(QuireError):
            read(text)
    with contextlib.suppress(QuireError):
        read_chunk_object(data)


def ranges(data: bytes) -> None:
    """Range and condition headers. A range that is granted lies within the object."""
    lines = (data.decode("latin-1").split("\n") + [""] * 5)[:5]
    for size in (0, 1, 10, 1 << 40):
        try:
            span = read_range(lines[0], size)
        except S3Error:
            continue
        assert span is None or 0 <= span[0] < span[1] <= size
    conditions = Conditions(*lines[1:])
    with contextlib.suppress(S3Error):
        conditions.check_read("abc", 1e9)
    with contextlib.suppress(S3Error):
        conditions.check_write("abc")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "chunked": chunked,
    "headers": headers,
    "bodies": bodies,
    "descriptors": descriptors,
    "ranges": ranges,
}

SEEDS: dict[str, list[bytes]] = {
    "chunked": [
        b"\x02\x05" + b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:abc=\r\n\r\n",
        b"\x00\x10" + b"5;chunk-signature=" + b"0" * 64 + b"\r\nhello\r\n",
        b"\x01\x10" + b"0;chunk-signature=" + b"0" * 64 + b"\r\nx-amz-trailer-signature:" + b"0" * 64 + b"\r\n\r\n",
    ],
    "headers": [
        b"/a?b=c\nhost:x\nx-amz-date:20130524T000000Z\nx-amz-content-sha256:UNSIGNED-PAYLOAD\nauthorization:"
        b"AWS4-HMAC-SHA256 Credential=K/20130524/r/s3/aws4_request, SignedHeaders=host;x-amz-date, Signature="
        + b"0"
        * 64,
        b"/a?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K%2F20130524%2Fr%2Fs3%2Faws4_request&X-Amz-Date="
        b"20130524T000000Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=" + b"0" * 64 + b"\nhost:x",
    ],
    "bodies": [
        b"<Delete><Object><Key>a</Key></Object><Quiet>true</Quiet></Delete>",
        b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>x</ETag></Part></CompleteMultipartUpload>",
        b"<CreateBucketConfiguration><LocationConstraint>x</LocationConstraint></CreateBucketConfiguration>",
    ],
    "descriptors": [
        Descriptor.from_header.__doc__.encode() if Descriptor.from_header.__doc__ else b"",
        b"ucx1.AAAAAAAAEAAAAAAAAAAQAAQAYWJjZGVmZ2g=",
        b'{"model_id":"m","weight_version":"1","tenant_salt_hex":"","adapter":"","num_layers":4,"chunk_tokens":16,'
        b'"kv_heads":2,"head_dim":64,"dtype":"float16","attention":"kv_heads"}',
    ],
    "ranges": [b'bytes=0-9\n"abc"\n*\nFri, 24 May 2013 00:00:00 GMT', b"bytes=-5", b"bytes=5-"],
}
