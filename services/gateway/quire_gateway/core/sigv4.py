"""AWS Signature Version 4 for S3: the claim of a client, and the check of its signature.

In the Authorization header and in the query of presigned URLs (AWS, "Authenticating Requests (AWS Signature Version
4)"). Secrets and the time are arguments; nothing here knows HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from quire_gateway.core.s3_errors import S3Error

ALGORITHM: Final = "AWS4-HMAC-SHA256"
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
SKEW_S: Final = 900
EXPIRES_S_MAX: Final = 604_800
_STAMP: Final = re.compile(r"\d{8}T\d{6}Z")
_HEX64: Final = re.compile(r"[0-9a-f]{64}")
_SCOPE_PARTS: Final = 5
_AUTHORIZATION: Final = re.compile(
    rf"{ALGORITHM}\s+Credential=([^,\s]+),\s*SignedHeaders=([^,\s]+),\s*Signature=([0-9a-f]{{64}})\s*"
)


@dataclass(frozen=True, slots=True)
class Request:
    """The signed part of a request: the raw path and query, headers in order with lower-case names."""

    method: str
    path: str
    query: str
    headers: Sequence[tuple[str, str]]

    def header(self, name: str) -> str:
        """Return the values of that name, joined as in the signature; "" for none."""
        return ",".join(" ".join(value.split()) for key, value in self.headers if key == name)


@dataclass(frozen=True, slots=True)
class Claim:
    """Claimed signer of a request. `scope`: date/region/s3/aws4_request; `presigned`: it came in the query."""

    access_key: str
    scope: str
    stamp: str
    signed_headers: tuple[str, ...]
    signature: str
    payload_hash: str
    presigned: bool
    expires_s: int = 0

    @property
    def time_s(self) -> float:
        """When it was signed, Unix seconds."""
        return datetime.strptime(self.stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()


def parameters(query: str) -> list[tuple[str, str]]:
    """Decode a raw query; "+" is itself."""
    parts = [part.partition("=") for part in query.split("&") if part]
    return [(_text(name), _text(value)) for name, _, value in parts]


def read_claim(request: Request) -> Claim | None:
    """Read the claim; None for an anonymous request. Raises `S3Error` for one that cannot be understood."""
    fields = dict(parameters(request.query)) if "X-Amz-Signature=" in request.query else {}
    authorization = request.header("authorization")
    if fields and authorization:
        raise S3Error("InvalidArgument", "Only one auth mechanism allowed; a header and a query were given")
    if fields:
        return _presigned(request, fields)
    if authorization.startswith("AWS ") or "AWSAccessKeyId=" in request.query:
        raise S3Error(
            "InvalidRequest",
            f"Signature Version 2 is not supported. Please use {ALGORITHM}; in boto3 and s3fs that is "
            'Config(signature_version="s3v4")',
        )
    if not authorization:
        return None
    matched = _AUTHORIZATION.fullmatch(authorization)
    if matched is None:
        raise S3Error("AuthorizationHeaderMalformed", f"The authorization header is not {ALGORITHM} of Version 4")
    credential, signed, signature = matched.groups()
    stamp = request.header("x-amz-date")
    if not stamp:
        raise S3Error("AccessDenied", "A signed request needs x-amz-date")
    access_key, scope = _credential(credential, stamp)
    payload_hash = request.header("x-amz-content-sha256")
    if not payload_hash:
        raise S3Error("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    return Claim(access_key, scope, stamp, tuple(signed.split(";")), signature, payload_hash, presigned=False)


def _presigned(request: Request, fields: dict[str, str]) -> Claim:
    try:
        algorithm, credential, stamp = fields["X-Amz-Algorithm"], fields["X-Amz-Credential"], fields["X-Amz-Date"]
        signed, expires = fields["X-Amz-SignedHeaders"], fields["X-Amz-Expires"]
        signature = fields["X-Amz-Signature"]
    except KeyError:
        raise S3Error(
            "AuthorizationQueryParametersError",
            "Query-string authentication needs X-Amz-Algorithm, Credential, Signature, Date, SignedHeaders and Expires",
        ) from None
    if algorithm != ALGORITHM:
        raise S3Error("AuthorizationQueryParametersError", f"X-Amz-Algorithm is {ALGORITHM}")
    expires_s = int(expires) if expires.isascii() and expires.isdigit() and len(expires) < 10 else 0
    if not 0 < expires_s <= EXPIRES_S_MAX:
        raise S3Error("AccessDenied", f"X-Amz-Expires is a number of seconds from 1 to {EXPIRES_S_MAX}")
    if not _HEX64.fullmatch(signature):
        raise S3Error("AuthorizationQueryParametersError", "X-Amz-Signature has 64 hexadecimal digits")
    access_key, scope = _credential(credential, stamp)
    names = tuple(signed.split(";"))
    payload_hash = fields.get("X-Amz-Content-Sha256", UNSIGNED)
    if payload_hash == UNSIGNED and request.header("x-amz-content-sha256").startswith("STREAMING-"):
        raise S3Error("InvalidRequest", "A presigned request cannot have a chunked body")
    return Claim(
        access_key,
        scope,
        stamp=stamp,
        signed_headers=names,
        signature=signature,
        payload_hash=payload_hash,
        presigned=True,
        expires_s=expires_s,
    )


def _credential(credential: str, stamp: str) -> tuple[str, str]:
    access_key, _, scope = credential.partition("/")
    parts = scope.split("/")
    if len(parts) != _SCOPE_PARTS - 1 or parts[2:] != ["s3", "aws4_request"] or not access_key:
        raise S3Error("AuthorizationHeaderMalformed", "The credential is not KEY/DATE/REGION/s3/aws4_request")
    if not _STAMP.fullmatch(stamp) or stamp[:8] != parts[0]:
        raise S3Error("AuthorizationHeaderMalformed", "The date is not that of the credential's scope")
    try:
        datetime.strptime(stamp, "%Y%m%dT%H%M%SZ")
    except ValueError:
        raise S3Error("AuthorizationHeaderMalformed", f"{stamp} is no time") from None
    return access_key, scope


def verify(request: Request, claim: Claim, secret: str, now_s: float) -> bytes:
    """The signing key, for what else is signed in the body. Raises `S3Error` for whatever does not fit.

    Takes the same time whichever byte of the signature is wrong.
    """
    if "host" not in claim.signed_headers:
        raise S3Error("AccessDenied", "The host header must be signed")
    # What changes a request's meaning is signed: a presigned URL is for one thing.
    required = {name for name, _ in request.headers if name.startswith(("x-amz-", "x-quire-"))}
    unsigned = required - set(claim.signed_headers) - ({"x-amz-content-sha256"} if claim.presigned else set())
    if unsigned:
        raise S3Error(
            "AccessDenied", f"There were headers present which were not signed: {', '.join(sorted(unsigned))}"
        )
    age_s = now_s - claim.time_s
    if claim.presigned and not -SKEW_S <= age_s <= claim.expires_s:
        raise S3Error("AccessDenied", "Request has expired")
    if not claim.presigned and abs(age_s) > SKEW_S:
        raise S3Error(
            "RequestTimeTooSkewed", "The difference between the request time and the current time is too large"
        )
    key = signing_key(secret, claim.scope)
    expected = sign(key, string_to_sign(request, claim))
    if not hmac.compare_digest(expected.encode(), claim.signature.encode(errors="surrogateescape")):
        raise S3Error(
            "SignatureDoesNotMatch",
            "The request signature we calculated does not match the signature you provided. Check your key and signing "
            "method.",
        )
    return key


def authorization(request: Request, access_key: str, secret: str, stamp: str, region: str) -> str:
    """The header that signs all of the request's headers, x-amz-date and x-amz-content-sha256 among them."""
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    names = tuple(sorted({name for name, _ in request.headers}))
    claim = Claim(access_key, scope, stamp, names, "", request.header("x-amz-content-sha256"), presigned=False)
    signature = sign(signing_key(secret, scope), string_to_sign(request, claim))
    return f"{ALGORITHM} Credential={access_key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"


def string_to_sign(request: Request, claim: Claim) -> str:
    """Algorithm, time, scope, digest of the canonical request."""
    digest = hashlib.sha256(canonical_request(request, claim).encode("utf-8", "surrogateescape")).hexdigest()
    return "\n".join((ALGORITHM, claim.stamp, claim.scope, digest))


def canonical_request(request: Request, claim: Claim) -> str:
    """Build the canonical request as the client must have."""
    pairs = [(_encoded(name), _encoded(value)) for name, value in _raw_parameters(request.query)]
    query = "&".join(f"{name}={value}" for name, value in sorted(pairs) if name != "X-Amz-Signature")
    values: dict[str, list[str]] = {}
    for name, value in request.headers:
        values.setdefault(name, []).append(" ".join(value.split()))
    headers = "".join(f"{name}:{','.join(values.get(name, ()))}\n" for name in claim.signed_headers)
    path = quote(unquoted(request.path), safe="/-_.~")
    return "\n".join((request.method, path, query, headers, ";".join(claim.signed_headers), claim.payload_hash))


def signing_key(secret: str, scope: str) -> bytes:
    """Derive the key by date, region, service."""
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(errors="surrogateescape"), "sha256")
    return key


def sign(key: bytes, text: str) -> str:
    """HMAC-SHA256 of a text, hexadecimal."""
    return hmac.digest(key, text.encode(errors="surrogateescape"), "sha256").hex()


def _raw_parameters(query: str) -> list[tuple[bytes, bytes]]:
    parts = [part.partition("=") for part in query.split("&") if part]
    return [(unquoted(name), unquoted(value)) for name, _, value in parts]


def unquoted(text: str) -> bytes:
    """Percent-decoded. `text` has bytes that are not UTF-8 as lone surrogates, as the HTTP parser leaves them."""
    return unquote_to_bytes(text.encode("utf-8", "surrogateescape"))


def _encoded(raw: bytes) -> str:
    return quote(raw, safe="-_.~")


def _text(raw: str) -> str:
    try:
        return unquoted(raw).decode()
    except UnicodeDecodeError:
        raise S3Error("InvalidURI", "The query is not UTF-8") from None
