"""The operations of S3 that this frontend implements, with their parameters and headers.

In S3 a parameter or an `x-amz-` header changes the meaning of a request. One that an operation does not take is
refused, so that no request does something else than its sender meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from quire_gateway.core.s3_errors import S3Error

_EVERYWHERE: Final = frozenset({"x-id"})
_SIGNED_URL: Final = frozenset(
    f"x-amz-{name}"
    for name in ("algorithm", "credential", "date", "expires", "signature", "signedheaders")
)  # fmt: skip
OF_ANY_REQUEST: Final = frozenset(
    f"x-amz-{name}"
    for name in (
        "cf-id", "content-sha256", "date", "expected-bucket-owner", "request-payer", "security-token", "user-agent",
    )
)  # fmt: skip
_IN_ANY_URL: Final = _SIGNED_URL | OF_ANY_REQUEST
ENCRYPTION: Final = "x-amz-server-side-encryption"
_CHECKSUMS: Final = frozenset({"x-amz-checksum-", "x-amz-sdk-checksum-algorithm"})
"""Clients put them into signed URLs, too, though the body is unknown then: there they are not compared."""
_BODY: Final = _CHECKSUMS | {"x-amz-decoded-content-length", "x-amz-trailer"}
_ACL: Final = frozenset({"x-amz-acl"})
_PLAIN: Final = _ACL | {"x-amz-storage-class"}
_NEW_OBJECT: Final = _PLAIN | {"x-amz-meta-", "x-amz-tagging", ENCRYPTION}
_VERSION: Final = frozenset({"versionId"})
_COPY: Final = "x-amz-copy-source"
_CONDITIONS: Final = ("if-match", "if-modified-since", "if-none-match", "if-unmodified-since")
_SOURCE: Final = frozenset({_COPY, "x-amz-source-expected-bucket-owner", *(f"{_COPY}-{name}" for name in _CONDITIONS)})
_RDMA: Final = frozenset({"x-amz-rdma-"})
_LOCK_BYPASS: Final = frozenset({"x-amz-bypass-governance-retention"})
"""Nothing is locked here, so that it changes nothing."""
_PAGE: Final = frozenset({"delimiter", "encoding-type", "max-keys", "prefix"})
_ANSWER: Final = frozenset(
    f"response-{name}"
    for name in (
        "cache-control", "content-disposition", "content-encoding", "content-language", "content-type", "expires",
    )
)  # fmt: skip
_READ: Final = _ANSWER | {"partNumber", "versionId"}
_ATTRIBUTES: Final = frozenset({"x-amz-object-attributes", "x-amz-max-parts", "x-amz-part-number-marker"})
_READ_HEADERS: Final = _RDMA | {"x-amz-checksum-mode"}
ONLY: Final[Mapping[str, frozenset[str]]] = {
    "x-amz-bucket-object-lock-enabled": frozenset({"false"}),
    "x-amz-object-ownership": frozenset({"BucketOwnerEnforced"}),
    "x-amz-storage-class": frozenset({"STANDARD"}),
    "x-amz-acl": frozenset({"private", "public-read"}),
    "x-amz-tagging-directive": frozenset({"COPY", "REPLACE"}),
    ENCRYPTION: frozenset({"AES256"}),
}
"""The only values that are taken of some parameters and headers."""
_ASKING: Final = frozenset({ENCRYPTION, "x-amz-tagging-directive"})
"""Those that ask for something, and are read from headers only; the others ask for nothing."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation.

    Attributes:
        name: S3's.
        level: "service", "bucket" or "object".
        method: Of HTTP.
        subresource: The parameter that selects it; "" for none.
        parameters: Further ones that it takes.
        headers: `x-amz-` headers that it takes, besides those of any request. A name that ends with a hyphen stands for
            all that begin with it.
    """

    name: str
    level: str
    method: str
    subresource: str = ""
    parameters: frozenset[str] = frozenset()
    headers: frozenset[str] = frozenset()

    def check(self, query: Mapping[str, str], headers: Iterable[tuple[str, str]]) -> None:
        """Check the parameters and headers of a request.

        Raises:
            S3Error: NotImplemented: it has one that this operation does not take.
        """
        taken = self.parameters | _EVERYWHERE | ({self.subresource} if self.subresource else frozenset())
        for name, value in query.items():
            low = name.lower()
            is_plain = _is_in(low, _CHECKSUMS) or (low in ONLY and low not in _ASKING and _is_plain(low, value))
            if low in _IN_ANY_URL or (is_plain and self._takes(low)):
                continue
            if low.startswith("x-amz-"):
                raise S3Error("NotImplemented", f"{low} in a signed URL is not implemented here; send it as a header")
            if name not in taken or not _is_plain(name, value):
                raise S3Error("NotImplemented", f"{self.name} with ?{_shown(name, value)} is not implemented here")
        for name, value in headers:
            low = name.lower()
            if low.startswith("x-amz-") and not (self._takes(low) and _is_plain(low, value)):
                raise S3Error("NotImplemented", f"{self.name} with {_shown(low, value)} is not implemented here")

    def _takes(self, header: str) -> bool:
        return header in OF_ANY_REQUEST or _is_in(header, self.headers)


def _is_in(header: str, names: frozenset[str]) -> bool:
    return header in names or any(name.endswith("-") and header.startswith(name) for name in names)


def _is_plain(name: str, value: str) -> bool:
    return name not in ONLY or value.strip() in ONLY[name]


def _shown(name: str, value: str) -> str:
    return f"{name}={value[:40]}" if name in ONLY else name


def _set(*names: str) -> frozenset[str]:
    return frozenset(names)


def _setting(name: str, subresource: str, delete: str = "") -> tuple[Operation, ...]:
    return (
        Operation(f"GetBucket{name}", "bucket", "GET", subresource),
        Operation(f"PutBucket{name}", "bucket", "PUT", subresource, headers=_CHECKSUMS),
        Operation(delete or f"DeleteBucket{name}", "bucket", "DELETE", subresource),
    )


COPIES: Final = (
    Operation(
        "UploadPartCopy",
        "object",
        "PUT",
        "partNumber",
        _set("uploadId"),
        _SOURCE | _CHECKSUMS | _PLAIN | {f"{_COPY}-range"},
    ),
    Operation(
        "CopyObject",
        "object",
        "PUT",
        headers=_NEW_OBJECT | _SOURCE | _CHECKSUMS | {"x-amz-metadata-directive", "x-amz-tagging-directive"},
    ),
)
"""Operations of requests that name a source (`x-amz-copy-source`)."""
OPERATIONS: Final = (
    Operation("ListBuckets", "service", "GET", "", _set("prefix", "max-buckets", "continuation-token")),
    Operation("PutBucketAcl", "bucket", "PUT", "acl", headers=_ACL | _CHECKSUMS),
    Operation("GetBucketAcl", "bucket", "GET", "acl"),
    Operation("GetBucketVersioning", "bucket", "GET", "versioning"),
    Operation("PutBucketVersioning", "bucket", "PUT", "versioning", headers=_CHECKSUMS),
    *_setting("Cors", "cors"),
    *_setting("LifecycleConfiguration", "lifecycle", delete="DeleteBucketLifecycle"),
    *_setting("Tagging", "tagging"),
    *_setting("Encryption", "encryption"),
    Operation(
        "CreateBucket",
        "bucket",
        "PUT",
        headers=_ACL | _CHECKSUMS | _RDMA | {"x-amz-bucket-object-lock-enabled", "x-amz-object-ownership"},
    ),
    Operation("HeadBucket", "bucket", "HEAD"),
    Operation("DeleteBucket", "bucket", "DELETE"),
    Operation("GetBucketLocation", "bucket", "GET", "location"),
    Operation("ListObjectVersions", "bucket", "GET", "versions", _PAGE | {"key-marker", "version-id-marker"}),
    Operation(
        "ListMultipartUploads",
        "bucket",
        "GET",
        "uploads",
        _set("delimiter", "prefix", "encoding-type", "max-uploads", "key-marker", "upload-id-marker"),
    ),
    Operation(
        "ListObjectsV2",
        "bucket",
        "GET",
        "list-type",
        _PAGE | {"continuation-token", "fetch-owner", "start-after"},
        _set("x-amz-optional-object-attributes"),
    ),
    Operation("ListObjects", "bucket", "GET", "", _PAGE | {"marker"}, _RDMA | {"x-amz-optional-object-attributes"}),
    Operation("DeleteObjects", "bucket", "POST", "delete", headers=_BODY | _LOCK_BYPASS),
    Operation("PutObjectAcl", "object", "PUT", "acl", _VERSION, _ACL | _CHECKSUMS),
    Operation("GetObjectAcl", "object", "GET", "acl", _VERSION),
    Operation("GetObjectTagging", "object", "GET", "tagging", _VERSION),
    Operation("PutObjectTagging", "object", "PUT", "tagging", _VERSION, _CHECKSUMS),
    Operation("DeleteObjectTagging", "object", "DELETE", "tagging", _VERSION),
    Operation("GetObjectAttributes", "object", "GET", "attributes", _VERSION, _ATTRIBUTES),
    Operation("UploadPart", "object", "PUT", "partNumber", _set("uploadId"), _BODY | _PLAIN),
    Operation("PutObject", "object", "PUT", headers=_BODY | _NEW_OBJECT | _RDMA),
    Operation("ListParts", "object", "GET", "uploadId", _set("max-parts", "part-number-marker")),
    Operation("GetObject", "object", "GET", "", _READ, _READ_HEADERS),
    Operation("HeadObject", "object", "HEAD", "", _READ, _READ_HEADERS),
    Operation("AbortMultipartUpload", "object", "DELETE", "uploadId"),
    Operation(
        "DeleteObject",
        "object",
        "DELETE",
        "",
        _VERSION,
        _LOCK_BYPASS | {"x-amz-if-match-last-modified-time", "x-amz-if-match-size"},
    ),
    Operation("CreateMultipartUpload", "object", "POST", "uploads", headers=_NEW_OBJECT | _CHECKSUMS),
    Operation(
        "CompleteMultipartUpload",
        "object",
        "POST",
        "uploadId",
        headers=_CHECKSUMS | _PLAIN | {"x-amz-mp-object-size"},
    ),
)
"""The first that fits a request is its operation."""

GET_CHUNKS: Final = Operation("GetChunks", "bucket", "POST", headers=_BODY | _RDMA)
"""Not S3's: a body that names many chunks, whose bytes go by RDMA."""


def operation_of(level: str, method: str, query: Mapping[str, str], *, copies: bool) -> Operation:
    """Return the operation of a request. `copies`: it names the source of a copy.

    Raises:
        S3Error: NotImplemented, MethodNotAllowed.
    """
    for operation in (*COPIES, *OPERATIONS) if copies else OPERATIONS:
        if (operation.level, operation.method) == (level, method) and (
            not operation.subresource or operation.subresource in query
        ):
            return operation
    if level == "object" and method == "POST":
        raise S3Error("NotImplemented", "POST of this kind is not implemented here")
    raise S3Error("MethodNotAllowed", "The specified method is not allowed against this resource.")
