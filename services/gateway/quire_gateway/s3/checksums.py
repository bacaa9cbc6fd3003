"""Checks of a body before it is kept: its length, its digests, and the client's declarations of these.

The checksum of an object that is made of parts is of its bytes, or of its parts' checksums.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from awscrt import checksums as crt

from quire.model.buckets import UploadPart
from quire_gateway.core.s3_errors import S3Error

PREFIX: Final = "x-amz-checksum-"
COMPOSITE, FULL_OBJECT = "COMPOSITE", "FULL_OBJECT"


class _Sum(Protocol):
    def update(self, data: Any, /) -> None: ...
    def digest(self) -> bytes: ...


class _Crc:
    """One of awscrt's functions as a running sum; big-endian, as S3 writes it."""

    def __init__(self, function: Callable[..., int], size: int) -> None:
        self._function = function
        self._size = size
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")


_MAKE: Final[Mapping[str, Callable[[], _Sum]]] = {
    "crc32": lambda: _Crc(crt.crc32, 4),
    "crc32c": lambda: _Crc(crt.crc32c, 4),
    "crc64nvme": lambda: _Crc(crt.crc64nvme, 8),
    "sha1": hashlib.sha1,
    "sha256": hashlib.sha256,
}
_COMBINE: Final[Mapping[str, Callable[[int, int, int], int]]] = {
    "crc32": crt.combine_crc32,
    "crc32c": crt.combine_crc32c,
    "crc64nvme": crt.combine_crc64nvme,
}
"""Of the bytes that have the first checksum, and behind them so many that have the second."""


class BodyChecks:
    """Feed it every byte; `finish` compares. MD5 is S3's ETag, so it is always made.

    `declared`: x-amz-checksum-* of the request's headers, by algorithm, base64. `trailing`: the algorithm whose value
    comes in a trailer. `content_md5`: base64; None if there is none. `payload_sha256`: hexadecimal, as signed.
    """

    def __init__(
        self, declared: Mapping[str, str], trailing: str, content_md5: str | None = None, payload_sha256: str = ""
    ) -> None:
        unknown = [name for name in (*declared, *filter(None, (trailing,))) if name not in _MAKE]
        if unknown:
            raise S3Error("InvalidRequest", f"Unknown checksum algorithm {unknown[0]}; there are {', '.join(_MAKE)}")
        if len({*declared, *filter(None, (trailing,))}) > 1:
            raise S3Error("InvalidRequest", "Expecting a single x-amz-checksum- header")
        self._declared = {name: _decoded(value, "x-amz-checksum-" + name) for name, value in declared.items()}
        self._trailing = trailing
        self._content_md5 = _md5_of(content_md5) if content_md5 is not None else b""
        self._payload_sha256 = payload_sha256
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._sums: dict[str, _Sum] = {name: _MAKE[name]() for name in {*declared, *filter(None, (trailing,))}}
        if payload_sha256 and "sha256" not in self._sums:
            self._sums["sha256"] = hashlib.sha256()
        self._kept: set[str] = set()
        self.size = 0

    def keep(self, algorithm: str) -> None:
        """Make a checksum that the client may not have declared. Raises `S3Error` if it has declared another one."""
        if not algorithm:
            return
        if foreign := {*self._declared, *filter(None, (self._trailing,))} - {algorithm}:
            raise S3Error("InvalidRequest", f"The upload's checksums are {algorithm}, not {min(foreign)}")
        self._kept.add(algorithm)
        self._sums.setdefault(algorithm, _MAKE[algorithm]())

    def update(self, data: Any) -> None:
        self._md5.update(data)
        for checksum in self._sums.values():
            checksum.update(data)
        self.size += len(data)

    def finish(self, trailers: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """The MD5, hexadecimal, and the checksums to keep, by algorithm, base64. Raises `S3Error`."""
        digests = {name: checksum.digest() for name, checksum in self._sums.items()}
        if self._payload_sha256 and not hmac.compare_digest(digests["sha256"].hex(), self._payload_sha256):
            raise S3Error("XAmzContentSHA256Mismatch", "The provided 'x-amz-content-sha256' header does not match")
        if self._content_md5 and self._content_md5 != self._md5.digest():
            raise S3Error("BadDigest", "The Content-MD5 you specified did not match what we received.")
        declared = dict(self._declared)
        if self._trailing:
            value = trailers.get(PREFIX + self._trailing, "")
            if not value:
                raise S3Error("MalformedTrailerError", f"The trailer {PREFIX}{self._trailing} did not come")
            declared[self._trailing] = _decoded(value, PREFIX + self._trailing)
        for name, expected in declared.items():
            if expected != digests[name]:
                raise S3Error("BadDigest", f"The {name.upper()} you specified did not match what we received.")
        encoded = {name: base64.b64encode(digests[name]).decode() for name in sorted({*declared, *self._kept})}
        return self._md5.hexdigest(), encoded


def checksum_type_of(algorithm: str, kind: str) -> tuple[str, bool]:
    """Return the algorithm of an upload's checksum, and whether it is of the full object. Raises `S3Error`.

    Args:
        algorithm: As in `x-amz-checksum-algorithm`.
        kind: As in `x-amz-checksum-type`; "" for S3's default of the algorithm.
    """
    name = algorithm.lower()
    if not name:
        if kind:
            raise S3Error("InvalidRequest", "x-amz-checksum-type needs x-amz-checksum-algorithm")
        return "", False
    if name not in _MAKE:
        raise S3Error("InvalidRequest", f"Unknown checksum algorithm {algorithm[:40]}; there are {', '.join(_MAKE)}")
    kinds = [COMPOSITE] * (name != "crc64nvme") + [FULL_OBJECT] * (name in _COMBINE)
    chosen = kind.upper() or kinds[0]
    if chosen not in kinds:
        raise S3Error("InvalidRequest", f"The {kind[:40]} checksum type cannot be used with {name}")
    return name, chosen == FULL_OBJECT


def combined_checksum(algorithm: str, full_object: bool, parts: Sequence[UploadPart]) -> str:
    """Return the checksum of the object that parts make, each of which has one of that algorithm."""
    digests = [base64.b64decode(part.checksums[algorithm]) for part in parts]
    if not full_object:
        checksum = _MAKE[algorithm]()
        checksum.update(b"".join(digests))
        return f"{base64.b64encode(checksum.digest()).decode()}-{len(parts)}"
    value, size = 0, len(digests[0])
    for part, digest in zip(parts, digests, strict=True):
        value = _COMBINE[algorithm](value, int.from_bytes(digest, "big"), part.size)
    return base64.b64encode(value.to_bytes(size, "big")).decode()


def kind_of(checksums: Mapping[str, str]) -> str:
    """Return the type of an object's checksums."""
    return COMPOSITE if any("-" in value for value in checksums.values()) else FULL_OBJECT


def _md5_of(header: str) -> bytes:
    try:
        digest = base64.b64decode(header, validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != hashlib.md5(usedforsecurity=False).digest_size:
        raise S3Error("InvalidDigest", "The Content-MD5 you specified is not valid.")
    return digest


def _decoded(value: str, name: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise S3Error("InvalidRequest", f"Value for {name} header is invalid.") from None
