"""What the S3 frontend reads from strangers, as functions of bytes. Each may raise its own errors and nothing else.

True: all of it was understood. Seeds are, so that a target that refuses everything at once is noticed.

python -m tests.fuzz.run NAME CORPUS [libFuzzer's options]     coverage-guided, by atheris
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable

import numpy as np

from quire.model.chunk_object import CRC_FROM, HEADER, HEADER_MAGIC, read_chunk_object, write_chunk_object
from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.errors import QuireError
from quire.model.hashing import Namespace
from quire.model.keys import ChunkKeys
from quire.model.layout import Dtype, KvLayout
from quire_gateway.core.aws_chunked import MODES, AwsChunked, Signing
from quire_gateway.core.preconditions import Preconditions
from quire_gateway.core.ranges import check_read, check_write, read_range
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.sigv4 import EMPTY_SHA256, Claim, Request, parameters, read_claim, sign, verify
from quire_gateway.s3 import xml

_CLAIM = Claim("k", "20130524/r/s3/aws4_request", "20130524T000000Z", ("host",), "0" * 64, MODES[0], presigned=False)


def chunked(data: bytes) -> bool:
    """Framed bodies, in pieces of every size; what comes out is never more than what came in."""
    if len(data) < 2:
        return False
    mode, step, body = MODES[data[0] % len(MODES)], data[1] % 64 + 1, data[2:]
    decoding = AwsChunked(mode, Signing(b"key", _CLAIM) if "HMAC" in mode else None)
    out, understood = 0, False
    with contextlib.suppress(S3Error):
        for at in range(0, len(body), step):
            for piece in decoding.feed(body[at : at + step]):
                out += len(piece)
        decoding.finish()
        understood = True
    assert out <= len(body)
    assert out == decoding.decoded_bytes
    return understood


def headers(data: bytes) -> bool:
    """Request lines and headers, to the signature."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    path, _, query = lines[0].partition("?")
    pairs = [(name.lower(), value) for name, _, value in (line.partition(":") for line in lines[1:])]
    request = Request("GET", path, query, pairs)
    try:
        parameters(query)
        claim = read_claim(request)
        if claim is not None:
            verify(request, claim, "secret", 1369353600.0)
            raise AssertionError("a signature was guessed")
    except S3Error as error:
        return error.code == "SignatureDoesNotMatch"
    return False


def bodies(data: bytes) -> bool:
    """XML."""
    understood = False
    for read in (xml.read_delete, xml.read_complete, xml.check_create):
        with contextlib.suppress(S3Error):
            read(data)
            understood = True
    return understood


def descriptors(data: bytes) -> bool:
    """Descriptors, tokens, namespaces, chunks as objects."""
    text, understood = data.decode("latin-1"), False
    for read in (Descriptor.from_header, RdmaTarget.from_token, Namespace.from_json):
        with contextlib.suppress(QuireError):
            read(text)
            understood = True
    with contextlib.suppress(QuireError):
        read_chunk_object(data)
        understood = True
    return understood


def ranges(data: bytes) -> bool:
    """Range and condition headers. A range that is granted lies within the object."""
    lines = (data.decode("latin-1").split("\n") + [""] * 5)[:5]
    understood = False
    for size in (0, 1, 10, 1 << 40):
        try:
            span = read_range(lines[0], size)
        except S3Error:
            continue
        assert span is None or 0 <= span[0] < span[1] <= size
        understood = understood or span is not None
    conditions = Preconditions(*lines[1:])
    with contextlib.suppress(S3Error):
        check_read(conditions, "abc", 1e9)
    with contextlib.suppress(S3Error):
        check_write(conditions, "abc")
    return understood


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "chunked": chunked,
    "headers": headers,
    "bodies": bodies,
    "descriptors": descriptors,
    "ranges": ranges,
}

_TARGET = RdmaTarget(b"worker", 4096, 1 << 20, b"key")
_LAYOUT = KvLayout(4, 16, 2, 64, Dtype.FP16)
_DESCRIPTOR = Descriptor(ChunkKeys(b"k" * 32 + b"l" * 32), 4, 16, _LAYOUT.slice_bytes, DeliveryOrder.LAYERWISE, _TARGET)


def _chunk_object() -> bytes:
    """Two layers of three bytes."""
    payload = np.arange(6, dtype=np.uint8).reshape(2, 3)
    row = np.zeros(1, dtype=HEADER)
    row["magic"], row["num_layers"], row["slice_bytes"], row["key"] = HEADER_MAGIC, 2, 3, b"k" * 32
    header = bytearray(row.tobytes() + b"".join(zlib.crc32(layer.tobytes()).to_bytes(4, "little") for layer in payload))
    header[4:8] = zlib.crc32(header[CRC_FROM:]).to_bytes(4, "little")
    return write_chunk_object(payload, bytes(header))


# A signed chunk is understood only with its signature: of the empty first and last one.
_SIGNATURE = sign(
    b"key", "\n".join(("AWS4-HMAC-SHA256-PAYLOAD", _CLAIM.stamp, _CLAIM.scope, "0" * 64, EMPTY_SHA256, EMPTY_SHA256))
)
SEEDS: dict[str, list[bytes]] = {
    "chunked": [
        b"\x02\x05" + b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:abc=\r\n\r\n",
        b"\x00\x10" + f"0;chunk-signature={_SIGNATURE}\r\n\r\n".encode(),
    ],
    "headers": [
        b"/a?b=c\nhost:x\nx-amz-date:20130524T000000Z\nx-amz-content-sha256:UNSIGNED-PAYLOAD\nauthorization:"
        b"AWS4-HMAC-SHA256 Credential=K/20130524/r/s3/aws4_request, "
        b"SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature=" + b"0" * 64,
        b"/a?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K%2F20130524%2Fr%2Fs3%2Faws4_request&X-Amz-Date="
        b"20130524T000000Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=" + b"0" * 64 + b"\nhost:x",
    ],
    "bodies": [
        b"<Delete><Object><Key>a</Key></Object><Quiet>true</Quiet></Delete>",
        b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>x</ETag></Part></CompleteMultipartUpload>",
        b"<CreateBucketConfiguration><LocationConstraint>x</LocationConstraint></CreateBucketConfiguration>",
    ],
    "descriptors": [
        _DESCRIPTOR.to_header().encode(),
        _TARGET.to_token().encode(),
        Namespace("m", "1", _LAYOUT).to_json().encode(),
        _chunk_object(),
    ],
    "ranges": [b'bytes=0-9\n"abc"\n*\nFri, 24 May 2013 00:00:00 GMT', b"bytes=-5", b"bytes=5-"],
}
