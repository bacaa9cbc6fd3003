"""S3's error codes and their HTTP status, as AWS documents them ("Error responses"); of quotas, as Ceph has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.model import errors

STATUS: Final[Mapping[str, int]] = {
    "AccessDenied": 403,
    "AccessForbidden": 403,
    "AuthorizationHeaderMalformed": 400,
    "AuthorizationQueryParametersError": 400,
    "BadDigest": 400,
    "BadRequest": 400,
    "BucketAlreadyExists": 409,
    "BucketAlreadyOwnedByYou": 409,
    "BucketNotEmpty": 409,
    "ConditionalRequestConflict": 409,
    "EntityTooLarge": 400,
    "EntityTooSmall": 400,
    "IncompleteBody": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidBucketName": 400,
    "InvalidChunkSizeError": 403,
    "InvalidDigest": 400,
    "InvalidPart": 400,
    "InvalidPartNumber": 416,
    "InvalidPartOrder": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidTag": 400,
    "InvalidURI": 400,
    "KeyTooLongError": 400,
    "MalformedTrailerError": 400,
    "MalformedXML": 400,
    "MetadataTooLarge": 400,
    "MethodNotAllowed": 405,
    "MissingContentLength": 411,
    "NoSuchBucket": 404,
    "NoSuchCORSConfiguration": 404,
    "NoSuchKey": 404,
    "NoSuchLifecycleConfiguration": 404,
    "NoSuchTagSet": 404,
    "NoSuchUpload": 404,
    "NoSuchVersion": 404,
    "NotImplemented": 501,
    "NotModified": 304,
    "PreconditionFailed": 412,
    "QuotaExceeded": 403,
    "TooManyBuckets": 400,
    "RequestHeaderSectionTooLarge": 400,
    "RequestTimeTooSkewed": 403,
    "RequestTimeout": 400,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "XAmzContentSHA256Mismatch": 400,
}

# The most specific listed class decides; an unlisted error is a bug.
_OF_QUIRE: Final[Mapping[type[errors.QuireError], str]] = {
    errors.InvalidRequest: "InvalidArgument",
    errors.Unauthenticated: "AccessDenied",
    errors.NotAllowed: "AccessDenied",
    errors.LeaseForged: "AccessDenied",
    errors.LeaseExpired: "AccessDenied",
    errors.ChunkMissing: "NoSuchKey",
    errors.ImageMissing: "NoSuchKey",
    errors.ContentConflict: "ConditionalRequestConflict",
    errors.QuotaExceeded: "QuotaExceeded",
    errors.ResourceExhausted: "SlowDown",
    errors.Unavailable: "ServiceUnavailable",
    errors.DeadlineExceeded: "ServiceUnavailable",
    errors.NotImplementedHere: "NotImplemented",
    errors.VersionUnsupported: "ServiceUnavailable",
}


# What went wrong inside is not the client's to know.
_FIXED: Final = {
    "InternalError": "We encountered an internal error. Please try again.",
    "ServiceUnavailable": "Service is unable to handle the request. Please try again.",
}


class S3Error(Exception):
    """An error for an S3 client. `headers` are sent with the answer; `details` are elements of its document."""

    def __init__(
        self,
        code: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    @property
    def status(self) -> int:
        return STATUS[self.code]


def s3_error_of(error: errors.QuireError) -> S3Error:
    """Return the S3 error of the error's nearest listed ancestor."""
    code = next((_OF_QUIRE[kind] for kind in type(error).__mro__ if kind in _OF_QUIRE), "InternalError")
    retry_after = {"Retry-After": str(max(1, round(error.retry_after_s)))} if error.retry_after_s else {}
    return S3Error(code, _FIXED.get(code, str(error)), retry_after)
