"""An S3 request on its way through the frontend: its target, its caller, its parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from aiohttp import web

from quire_gateway.access.admission import Principal
from quire_gateway.core.aws_chunked import MODES, AwsChunked
from quire_gateway.core.limits import Taken
from quire_gateway.core.preconditions import Preconditions
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.sigv4 import UNSIGNED, Request, parameters, unquoted
from quire_gateway.s3.access import S3Caller
from quire_gateway.s3.body import Body
from quire_gateway.s3.checksums import PREFIX, BodyChecks
from quire_gateway.s3.declared import Described
from quire_gateway.s3.tagging import tags_of_header

PUBLIC_READ: Final = "public-read"
"""The canned ACL of a bucket that anyone may read."""
KEY_BYTES_MAX: Final = 1024
BODY_BYTES_MAX: Final = 5 << 30
XML_BYTES_MAX: Final = 1 << 20
METADATA_BYTES_MAX: Final = 2048
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ADDRESS: Final = re.compile(r"\d{1,3}(\.\d{1,3}){3}")
_VERSION_ID: Final = re.compile(r"null|[0-9a-f]{1,64}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_KEPT: Final = (
    "content-type",
    "content-encoding",
    "content-disposition",
    "content-language",
    "cache-control",
    "expires",
)


@dataclass(slots=True, kw_only=True)
class Call:
    """`bucket`, `key`: "" for none. `tenant`: of TENANT:BUCKET. `query`: decoded, the last of each name."""

    http: web.BaseRequest
    signed: Request
    bucket: str
    key: str
    query: Mapping[str, str]
    request_id: str
    tenant: str = ""
    caller: S3Caller = field(init=False)
    principal: Principal = field(init=False)
    admitted: Taken = field(init=False)
    streaming: web.StreamResponse | None = None
    shared_headers: dict[str, str] = field(default_factory=dict)
    """Headers of the answer, also of an error: CORS, encryption."""

    @property
    def method(self) -> str:
        return str(self.http.method)

    @property
    def resource(self) -> str:
        return "/" + "/".join(part for part in (self.bucket, self.key) if part)

    def header(self, name: str) -> str:
        return str(self.http.headers.get(name, "")).strip()

    @property
    def conditions(self) -> Preconditions:
        return Preconditions.of(self.http.headers)

    def check_acl(self, *, public: bool) -> None:
        """Check the canned ACL of the request. `public`: buckets may be `public-read`.

        Raises `S3Error` NotImplemented.
        """
        is_granted = any(name.lower().startswith("x-amz-grant-") for name in self.http.headers)
        acls = {self.header("x-amz-acl"), self.query.get("x-amz-acl", "")} - {"", "private"}
        if acls == {PUBLIC_READ} and self.header("x-amz-acl") and self.bucket and not self.key and not is_granted:
            if not public:
                raise S3Error("NotImplemented", "Public buckets are not allowed here (QUIRE_GATEWAY_S3_PUBLIC)")
        elif is_granted or acls:
            raise S3Error(
                "NotImplemented", "Of ACLs there is private, and public-read of buckets; access keys have grants"
            )

    def check_owner(self) -> None:
        """Check the owners that the client expects. Raises `S3Error` AccessDenied."""
        source, _, _ = unquote(self.header("x-amz-copy-source")).removeprefix("/").partition("/")
        expected = "x-amz-expected-bucket-owner"
        for name, bucket in ((expected, self.bucket), ("x-amz-source-expected-bucket-owner", source)):
            owner = self.header(name) or (self.query.get(name, "") if name == expected else "")
            if owner and bucket and owner != self.caller.tenant_of(bucket):
                raise S3Error("AccessDenied", f"The bucket's owner is not {name}")

    async def check_canned(self) -> None:
        """Check a request that sets an ACL. Raises `S3Error` for one that is not a canned one, as `x-amz-acl`."""
        if await self.xml():
            raise S3Error("NotImplemented", "ACLs are canned ones here, as x-amz-acl; access keys have grants")
        if not self.header("x-amz-acl"):
            raise S3Error("InvalidRequest", "A request to set an ACL needs x-amz-acl")

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """Return a number of the query. Raises `S3Error` InvalidArgument."""
        return _number(name, self.query.get(name, ""), default, low, high)

    def header_number(self, name: str, default: int, low: int, high: int) -> int:
        """Return a number of the headers. Raises `S3Error` InvalidArgument."""
        return _number(name, self.header(name), default, low, high)

    def described(self) -> Described:
        """Content headers, user metadata and tags. Raises `S3Error` MetadataTooLarge, InvalidTag."""
        headers = {name: self.header(name) for name in _KEPT if self.header(name)}
        if "content-encoding" in headers:
            encodings = headers["content-encoding"].split(",")
            encodings = [encoding for encoding in encodings if encoding.strip().lower() != "aws-chunked"]
            headers["content-encoding"] = ",".join(encodings).strip(", ")
            if not headers["content-encoding"]:
                del headers["content-encoding"]
        metadata: dict[str, str] = {}
        for name, value in self.http.headers.items():
            if name.lower().startswith("x-amz-meta-"):
                short = name.lower().removeprefix("x-amz-meta-")
                metadata[short] = f"{metadata[short]},{value}" if short in metadata else value
        for kind, pairs in (("metadata", metadata), ("content headers", headers)):
            if sum(len(name) + len(value.encode()) for name, value in pairs.items()) > METADATA_BYTES_MAX:
                raise S3Error("MetadataTooLarge", f"Your {kind} have more than {METADATA_BYTES_MAX} bytes")
        return Described(headers, metadata, tags_of_header(self.header("x-amz-tagging")))

    @property
    def version_id(self) -> str:
        """Version that the query names; "" for none. Raises `S3Error` InvalidArgument."""
        return checked_version(self.query.get("versionId", ""))

    @property
    def checksums(self) -> dict[str, str]:
        """`x-amz-checksum-` headers by algorithm."""
        return {
            name.lower().removeprefix(PREFIX): value
            for name, value in self.http.headers.items()
            if name.lower().startswith(PREFIX) and name.lower() not in (f"{PREFIX}type", f"{PREFIX}algorithm")
        }

    def body(self, *, checked: bool = True) -> Body:
        """Not read yet. Raises `S3Error` for a length or a framing that cannot be.

        `checked`: the checksum in the headers is that of the body.
        """
        mode = self.caller.payload_hash
        framing = None
        length_header = self.header("Content-Length")
        if mode.startswith("STREAMING-"):
            framing = AwsChunked(mode, self.caller.signing)
            length_header = self.header("x-amz-decoded-content-length")
        elif mode != UNSIGNED and not _SHA256.fullmatch(mode):
            raise S3Error("InvalidArgument", f"x-amz-content-sha256 is a SHA-256, {UNSIGNED}, or one of {MODES}")
        if not (length_header.isascii() and length_header.isdigit()):
            raise S3Error("MissingContentLength", "You must provide the length of the content")
        length = int(length_header) if len(length_header) < 16 else BODY_BYTES_MAX + 1
        if length > BODY_BYTES_MAX:
            raise S3Error("EntityTooLarge", f"Your proposed upload exceeds the maximum of {BODY_BYTES_MAX} bytes")
        declared = self.checksums if checked else {}
        trailer = self.header("x-amz-trailer").lower()
        if trailer and (framing is None or not mode.endswith("TRAILER") or not trailer.startswith(PREFIX)):
            raise S3Error("MalformedTrailerError", f"x-amz-trailer: {trailer[:80]} does not fit the request")
        signed_hash = mode if framing is None and mode != UNSIGNED else ""
        checks = BodyChecks(declared, trailer.removeprefix(PREFIX), self.http.headers.get("Content-MD5"), signed_hash)
        content: Any = self.http.content
        return Body(content, length, checks, framing)

    async def xml(self, *, checked: bool = True) -> bytes:
        """A small body. `checked`: the checksum in the headers is its own."""
        if not self.http.can_read_body:
            return b""
        body = self.body(checked=checked)
        await self.go_on()
        raw = await body.whole(XML_BYTES_MAX)
        body.finish()
        return raw

    async def go_on(self) -> None:
        """Tell a client that waits for it that its body is wanted."""
        if self.header("Expect").lower() == "100-continue":
            await self.http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.http.writer.output_size = 0


def _number(name: str, text: str, default: int, low: int, high: int) -> int:
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
        raise S3Error("InvalidArgument", f"{name} is a number from {low} to {high}")
    return int(text)


def read_call(http: web.BaseRequest, request_id: str, domain: str) -> Call:
    """Path style, and, under `domain`, virtual-host style. Raises `S3Error`."""
    raw_path, _, query = http.raw_path.partition("?")
    if raw_path.startswith(("http://", "https://")):
        raw_path = "/" + raw_path.split("/", 3)[3] if raw_path.count("/") > 2 else "/"
    headers = []
    for raw, value in http.raw_headers:
        name = raw.decode("latin-1").lower()
        try:
            headers.append((name, value.decode()))
        except UnicodeDecodeError:
            raise S3Error("InvalidRequest", f"The header {name} is not UTF-8") from None
    signed = Request(str(http.method), raw_path, query, headers)
    try:
        path = unquoted(raw_path).decode()
    except UnicodeDecodeError:
        raise S3Error("InvalidURI", "Couldn't parse the specified URI: it is not UTF-8") from None
    host = http.headers.get("Host", "").rpartition(":")[0] or http.headers.get("Host", "")
    if domain and host.endswith("." + domain):
        bucket, key = host.removesuffix("." + domain), path.removeprefix("/")
    else:
        bucket, _, key = path.removeprefix("/").partition("/")
    check_key(key)
    tenant, _, bucket = bucket.rpartition(":")
    decoded = dict(parameters(query))
    return Call(http=http, signed=signed, bucket=bucket, key=key, query=decoded, request_id=request_id, tenant=tenant)


def check_key(key: str) -> None:
    """Check an object's key. Raises `S3Error` KeyTooLongError, InvalidURI."""
    if len(key.encode()) > KEY_BYTES_MAX:
        raise S3Error("KeyTooLongError", "Your key is too long")
    if "\0" in key:
        raise S3Error("InvalidURI", "A key has no NUL")


def checked_version(version_id: str) -> str:
    """Return the id of a version, "" for none. Raises `S3Error` InvalidArgument for one that none can have."""
    if version_id and not _VERSION_ID.fullmatch(version_id):
        raise S3Error("InvalidArgument", "Invalid version id specified")
    return version_id


def check_bucket_name(bucket: str) -> None:
    """Check a name. Raises `S3Error` InvalidBucketName."""
    if (
        not _BUCKET.fullmatch(bucket)
        or _ADDRESS.fullmatch(bucket)
        or any(sequence in bucket for sequence in ("..", ".-", "-."))
    ):
        raise S3Error("InvalidBucketName", "The specified bucket is not valid.")
