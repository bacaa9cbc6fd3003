"""Checksums of objects that are made of parts, compared with those of their bytes."""

from __future__ import annotations

import base64
import hashlib
import random
import zlib

import pytest

from quire.model.buckets import UploadPart
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3.checksums import BodyChecks, checksum_type_of, combined_checksum, kind_of

_RNG = random.Random(5)


def _checksum(algorithm: str, data: bytes) -> str:
    checks = BodyChecks({}, "")
    checks.keep(algorithm)
    checks.update(data)
    _, checksums = checks.finish({})
    return checksums[algorithm]


def _parts(algorithm: str, contents: list[bytes]) -> list[UploadPart]:
    return [
        UploadPart(number, "", len(data), 0.0, (), {algorithm: _checksum(algorithm, data)})
        for number, data in enumerate(contents, 1)
    ]


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "crc64nvme"])
@pytest.mark.parametrize("sizes", [[0], [7], [1, 0, 3], [5000, 1, 70_000, 12]])
def test_a_checksum_of_the_full_object_is_that_of_its_bytes(algorithm: str, sizes: list[int]) -> None:
    contents = [_RNG.randbytes(size) for size in sizes]
    checksum = combined_checksum(algorithm, True, _parts(algorithm, contents))
    assert checksum == _checksum(algorithm, b"".join(contents))
    if algorithm == "crc32":
        assert base64.b64decode(checksum) == zlib.crc32(b"".join(contents)).to_bytes(4, "big")
    assert kind_of({algorithm: checksum}) == "FULL_OBJECT"


def test_a_composite_checksum_is_that_of_the_parts_checksums() -> None:
    contents = [b"one", b"two"]
    digest = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in contents)).digest()
    checksum = combined_checksum("sha256", False, _parts("sha256", contents))
    assert checksum == base64.b64encode(digest).decode() + "-2"
    assert kind_of({"sha256": checksum}) == "COMPOSITE"


@pytest.mark.parametrize(
    ("algorithm", "kind", "chosen"),
    [
        ("", "", ("", False)),
        ("CRC32", "", ("crc32", False)),
        ("CRC32C", "FULL_OBJECT", ("crc32c", True)),
        ("CRC64NVME", "", ("crc64nvme", True)),
        ("SHA1", "COMPOSITE", ("sha1", False)),
    ],
)
def test_the_type_that_is_not_said_is_s3s_own(algorithm: str, kind: str, chosen: tuple[str, bool]) -> None:
    assert checksum_type_of(algorithm, kind) == chosen


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("MD4", ""), ("SHA256", "FULL_OBJECT"), ("CRC64NVME", "COMPOSITE"), ("CRC32", "PARTLY"), ("", "COMPOSITE")],
)
def test_a_type_that_an_algorithm_has_not_is_refused(algorithm: str, kind: str) -> None:
    with pytest.raises(S3Error) as failed:
        checksum_type_of(algorithm, kind)
    assert failed.value.code == "InvalidRequest"


@pytest.mark.parametrize(("declared", "trailing"), [({"sha1": "AA=="}, ""), ({}, "crc32c")])
def test_a_part_has_the_uploads_algorithm(declared: dict[str, str], trailing: str) -> None:
    with pytest.raises(S3Error, match="The upload's checksums are crc32, not"):
        BodyChecks(declared, trailing).keep("crc32")
