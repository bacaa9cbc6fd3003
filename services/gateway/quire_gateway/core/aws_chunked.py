r"""The aws-chunked framing of uploads, piece by piece: signed chunks, unsigned chunks, trailers, signed trailers.

    SIZE[;chunk-signature=HEX]\r\n DATA \r\n ... 0[;chunk-signature=HEX]\r\n [NAME:VALUE\r\n ...] \r\n

(AWS, "Signature calculations: transferring a payload in multiple chunks", with and without trailing headers.) Data is
handed on before its chunk's signature is known: its consumer keeps nothing of an upload that ends in an error.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.sigv4 import EMPTY_SHA256, Claim, sign

MODES: Final = (
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
)
CHUNK_BYTES_MIN: Final = 8192
"""As AWS has it: tiny chunks would cost the gateway many times their bytes."""
_LINE_BYTES_MAX: Final = 4096
_TRAILER_BYTES_MAX: Final = 16 << 10
_HEADER: Final = re.compile(rb"([0-9a-fA-F]{1,16})(?:;chunk-signature=([0-9a-f]{64}))?")


@dataclass(frozen=True, slots=True)
class Signing:
    """Key and claim of chunk signatures; the first signature extends the request's."""

    key: bytes
    claim: Claim


class AwsChunked:
    """Feed it the body, take the payload; then `finish`. Bounded: it holds one line at a time."""

    def __init__(self, mode: str, signing: Signing | None) -> None:
        if mode not in MODES:
            raise S3Error("NotImplemented", f"{mode}; there are {', '.join(MODES)}")
        self._signed = "HMAC" in mode
        self._with_trailer = mode.endswith("TRAILER")
        if self._signed and signing is None:
            raise S3Error("AccessDenied", "Signed chunks need a signed request")
        self._signing = signing
        self._previous = signing.claim.signature if signing is not None else ""
        self._line = bytearray()
        self._left = 0
        self._chunk_bytes = 0  # of the chunk that was begun last
        self._state = "header"
        self._hash = hashlib.sha256()
        self._signature = ""
        self._trailer_bytes = 0
        self.trailers: dict[str, str] = {}
        self.decoded_bytes = 0

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Payload out of the next piece. Raises `S3Error`."""
        view, at = memoryview(data), 0
        while at < len(view):
            if self._state == "data":
                piece = view[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                self.decoded_bytes += len(piece)
                if self._signed:
                    self._hash.update(piece)
                yield piece
                if not self._left:
                    self._check_chunk()
                    self._state = "after data"
                continue
            if self._state == "done":
                raise S3Error("InvalidRequest", "The body goes on after its last chunk")
            end = data.find(b"\n", at)
            self._line += view[at : end + 1 if end >= 0 else len(view)]
            at = end + 1 if end >= 0 else len(view)
            if len(self._line) > _LINE_BYTES_MAX:
                raise S3Error("InvalidRequest", "A line of the chunked body is too long")
            if end >= 0:
                line = bytes(self._line).rstrip(b"\r\n")
                self._line.clear()
                self._take_line(line)

    def finish(self) -> None:
        """The body has ended. Raises `S3Error` if it should go on."""
        if self._state == "trailer" and not self._line and not self._with_trailer:
            self._state = "done"  # some clients end with the last chunk's line
        if self._state != "done":
            raise S3Error("IncompleteBody", "The request body terminated unexpectedly")

    def _take_line(self, line: bytes) -> None:
        if self._state == "after data":
            if line:
                raise S3Error("InvalidRequest", "A chunk is longer than its header says")
            self._state = "header"
        elif self._state == "header":
            self._take_header(line)
        elif line:
            self._take_trailer(line)
        else:
            self._check_trailers()
            self._state = "done"

    def _take_header(self, line: bytes) -> None:
        matched = _HEADER.fullmatch(line)
        if matched is None or (matched[2] is None) == self._signed:
            raise S3Error("InvalidRequest", "A chunk's header is not SIZE;chunk-signature=HEX, or SIZE if unsigned")
        if 0 < self._chunk_bytes < CHUNK_BYTES_MIN and int(matched[1], 16):
            why = f"Only the last chunk is allowed to have a size less than {CHUNK_BYTES_MIN} bytes"
            raise S3Error("InvalidChunkSizeError", why)
        self._left = self._chunk_bytes = int(matched[1], 16)
        self._signature = (matched[2] or b"").decode()
        self._hash = hashlib.sha256()
        self._state = "data" if self._left else "trailer"
        if not self._left:
            self._check_chunk()

    def _take_trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        name, colon, value = line.partition(b":")
        if not self._with_trailer or not colon or self._trailer_bytes > _TRAILER_BYTES_MAX:
            raise S3Error("MalformedTrailerError", "The request contained trailing data that was not well-formed")
        try:
            self.trailers[name.decode("ascii").strip().lower()] = value.decode("ascii").strip()
        except UnicodeDecodeError:
            raise S3Error("MalformedTrailerError", "A trailing header is not ASCII") from None

    def _check_chunk(self) -> None:
        if self._signed:
            text = (EMPTY_SHA256, self._hash.hexdigest())
            self._check("AWS4-HMAC-SHA256-PAYLOAD", text, self._signature)
            self._previous = self._signature

    def _check_trailers(self) -> None:
        signature = self.trailers.pop("x-amz-trailer-signature", "")
        if self._signed and self._with_trailer:
            canonical = "".join(f"{name}:{value}\n" for name, value in sorted(self.trailers.items()))
            digest = hashlib.sha256(canonical.encode()).hexdigest()
            self._check("AWS4-HMAC-SHA256-TRAILER", (digest,), signature)

    def _check(self, algorithm: str, digests: tuple[str, ...], signature: str) -> None:
        assert self._signing is not None, "signed bodies have it"
        claim = self._signing.claim
        text = "\n".join((algorithm, claim.stamp, claim.scope, self._previous, *digests))
        if not hmac.compare_digest(sign(self._signing.key, text), signature):
            raise S3Error("SignatureDoesNotMatch", "The signature of a chunk, or of the trailer, does not match")
