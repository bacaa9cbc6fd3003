"""The listener: connections in, one operation each, S3's errors out."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Final

from aiohttp import web

from quire.model.errors import QuireError
from quire.telemetry import logger, names
from quire_gateway.access.admission import Admission, Need
from quire_gateway.config import GatewayConfig
from quire_gateway.core.s3_errors import S3Error, s3_error_of
from quire_gateway.core.s3_operations import ENCRYPTION, GET_CHUNKS, Operation, operation_of
from quire_gateway.http.certificate import PublicCertificate
from quire_gateway.s3 import xml
from quire_gateway.s3.access import Authenticator
from quire_gateway.s3.backends import Backends
from quire_gateway.s3.buckets import BucketRequests
from quire_gateway.s3.call import Call, read_call
from quire_gateway.s3.cross_origin import CrossOrigin
from quire_gateway.s3.objects import ObjectRequests
from quire_gateway.s3.public import PublicBuckets
from quire_gateway.s3.rdma import DESCRIPTOR, NAMESPACE, TOKEN, RdmaRequests
from quire_gateway.s3.settings import BucketSettings
from quire_server import tasks
from quire_server.core.shares import SharedBound
from quire_server.http_requests import HttpRequests, traced
from quire_server.limits.connections import KEEPALIVE_S, listen
from quire_server.limits.shared_room import SharedRoom

Handler = Callable[[Call], Awaitable[web.StreamResponse]]
_SWEEP_S: Final = 60.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_READ_BYTES: Final = 1 << 20
OF_BUCKETS: Final[dict[str, Callable[[BucketRequests, Call], Awaitable[web.StreamResponse]]]] = {
    "ListBuckets": BucketRequests.list_buckets,
    "PutBucketAcl": BucketRequests.set_acl,
    "GetBucketAcl": BucketRequests.acl,
    "CreateBucket": BucketRequests.create,
    "HeadBucket": BucketRequests.head,
    "DeleteBucket": BucketRequests.delete,
    "GetBucketLocation": BucketRequests.location,
    "ListObjectVersions": BucketRequests.list_versions,
    "ListMultipartUploads": BucketRequests.list_uploads,
    "ListObjectsV2": BucketRequests.list_v2,
    "ListObjects": BucketRequests.list_v1,
    "DeleteObjects": BucketRequests.delete_objects,
}
OF_SETTINGS: Final[dict[str, Callable[[BucketSettings, Call], Awaitable[web.StreamResponse]]]] = {
    "GetBucketVersioning": BucketSettings.versioning,
    "PutBucketVersioning": BucketSettings.set_versioning,
    "GetBucketCors": BucketSettings.cors,
    "PutBucketCors": BucketSettings.set_cors,
    "DeleteBucketCors": BucketSettings.delete_cors,
    "GetBucketLifecycleConfiguration": BucketSettings.lifecycle,
    "PutBucketLifecycleConfiguration": BucketSettings.set_lifecycle,
    "DeleteBucketLifecycle": BucketSettings.delete_lifecycle,
    "GetBucketTagging": BucketSettings.tagging,
    "PutBucketTagging": BucketSettings.set_tagging,
    "DeleteBucketTagging": BucketSettings.delete_tagging,
    "GetBucketEncryption": BucketSettings.encryption,
    "PutBucketEncryption": BucketSettings.set_encryption,
    "DeleteBucketEncryption": BucketSettings.delete_encryption,
}
_SAYS_ENCRYPTED: Final = (
    "GetObject", "HeadObject", "PutObject", "CopyObject", "UploadPart", "UploadPartCopy", "CreateMultipartUpload",
    "CompleteMultipartUpload",
)  # fmt: skip
OF_OBJECTS: Final[dict[str, Callable[[ObjectRequests, Call], Awaitable[web.StreamResponse]]]] = {
    "PutObjectAcl": ObjectRequests.set_acl,
    "GetObjectAcl": ObjectRequests.acl,
    "GetObjectTagging": ObjectRequests.tagging,
    "PutObjectTagging": ObjectRequests.set_tagging,
    "DeleteObjectTagging": ObjectRequests.delete_tagging,
    "GetObjectAttributes": ObjectRequests.attributes,
    "UploadPart": ObjectRequests.put_part,
    "UploadPartCopy": ObjectRequests.put_part,
    "CopyObject": ObjectRequests.copy,
    "PutObject": ObjectRequests.put,
    "ListParts": ObjectRequests.list_parts,
    "GetObject": ObjectRequests.get,
    "HeadObject": ObjectRequests.get,
    "AbortMultipartUpload": ObjectRequests.abort_upload,
    "DeleteObject": ObjectRequests.delete,
    "CreateMultipartUpload": ObjectRequests.start_upload,
    "CompleteMultipartUpload": ObjectRequests.complete_upload,
}


class S3Frontend:
    """Does nothing without an address to listen on."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        authenticator: Authenticator,
        admission: Admission,
        backends: Backends,
        rdma: RdmaRequests,
    ) -> None:
        self._config = config
        self._authenticator = authenticator
        self._admission = admission
        self._backends = backends
        self._requests = HttpRequests("s3", malformed=_malformed)
        self._running = 0
        self._shares = SharedBound(config.s3_requests_max)
        self._runner: web.ServerRunner | None = None
        self._certificate: PublicCertificate | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._public = PublicBuckets(backends.buckets, config.s3_public)
        buckets, objects = (
            BucketRequests(backends, config.s3_region, admission.audit.request, self._public),
            ObjectRequests(backends, SharedRoom(config.s3_bytes_max)),
        )
        self._handlers: dict[str, Handler] = {name: partial(method, buckets) for name, method in OF_BUCKETS.items()}
        self._handlers |= {name: partial(method, objects) for name, method in OF_OBJECTS.items()}
        settings = BucketSettings(backends, config.s3_encrypted)
        self._handlers |= {name: partial(method, settings) for name, method in OF_SETTINGS.items()}
        self._cross_origin = CrossOrigin(backends.buckets, authenticator, self._public)
        # Requests whose bytes are sent another way, by (level, method) and the header that selects it.
        self._by_rdma: list[tuple[str, str, str, Handler]] = [
            ("object", "GET", TOKEN, rdma.get),
            ("object", "PUT", TOKEN, rdma.put),
            ("bucket", "GET", DESCRIPTOR, rdma.get_many),
            ("bucket", "PUT", DESCRIPTOR, rdma.put_many),
            ("bucket", "POST", NAMESPACE, rdma.get_many),
        ]

    async def start(self) -> None:
        if not self._config.s3_listen and not self._config.s3_tls_listen:
            return
        _keep_large_blocks()
        server = web.Server(
            self._serve,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=2,
            read_bufsize=_READ_BYTES,
            auto_decompress=False,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=self._config.stop_grace_s)
        await self._runner.setup()
        if self._config.s3_listen:
            await listen(self._runner, self._config.s3_listen, self._requests.connections)
        if self._config.s3_tls_listen:
            self._certificate = PublicCertificate(self._config.tls_cert, self._config.tls_key)
            await listen(
                self._runner, self._config.s3_tls_listen, self._requests.connections, self._certificate.context
            )
            self._certificate.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        await tasks.end([self._sweeper])
        if self._certificate is not None:
            await self._certificate.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        with self._requests.timed(http) as answer:
            response = await self._answer(http)
            answer.status = response.status
            return response

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        request_id = os.urandom(8).hex().upper()
        call: Call | None = None
        self._running += 1
        try:
            if self._running > 2 * self._config.s3_requests_max:
                raise _slow_down()
            with traced(http, names.GATEWAY_S3, request_id, strangers=self._config.asks_for_tokens) as span:
                call = read_call(http, request_id, self._config.s3_domain)
                check_implemented(call)
                if call.method == "OPTIONS":
                    response = await self._cross_origin.answer(call)
                else:
                    anyone = await self._public.caller(call)
                    call.caller = anyone or await self._authenticator.caller(call.signed)
                    call.principal = self._admission.principal(self._public.payer(call.caller.key))
                    await self._cross_origin.check(call)
                    operation, handler, by_rdma = self._operation(call)
                    self._public.check(call, operation, by_rdma)
                    span.set_attribute("quire.operation", operation.name)
                    if self._config.s3_encrypted and operation.name in _SAYS_ENCRYPTED:
                        call.shared_headers[ENCRYPTION] = "AES256"
                    response = await self._shared(handler, by_rdma, call)
        except (asyncio.CancelledError, ConnectionError):
            raise  # the client went away
        except Exception as error:
            self._admission.audit.request(f"S3 {http.method} {http.path}", error)
            if call is not None and call.streaming is not None:
                # The answer has begun: what would come now would count as the object's bytes.
                logger().error("an S3 answer broke off", request_id=request_id, exc_info=error)
                if http.transport is not None:
                    http.transport.abort()
                raise ConnectionResetError("the answer broke off") from error
            if call is not None:
                call.shared_headers.pop(ENCRYPTION, None)
            response = _failed(http, error, request_id)
        finally:
            self._running -= 1
        if not response.prepared:
            response.headers["x-amz-request-id"] = request_id
            response.headers.update(call.shared_headers if call is not None else {})
        if not http.content.is_eof():
            response.force_close()  # what is left of an unwanted body must not count as a request
        return response

    async def _shared(self, handler: Handler, by_rdma: bool, call: Call) -> web.StreamResponse:
        """Answer within the tenant's share of requests."""
        if not self._shares.take(call.principal.tenant):
            raise _slow_down()
        try:
            return await (handler(call) if by_rdma else self._admitted(handler, call))
        finally:
            self._shares.give_back(call.principal.tenant)

    async def _admitted(self, handler: Handler, call: Call) -> web.StreamResponse:
        """An operation whose bytes go by HTTP. What names memory is admitted once it is known how much."""
        with self._admission.admit(call.principal, Need(payload=call.http.content_length or 0)) as call.admitted:
            return await handler(call)

    def _operation(self, call: Call) -> tuple[Operation, Handler, bool]:
        """Return the operation, its handler, and whether its bytes are sent by RDMA.

        Raises:
            S3Error: NotImplemented, MethodNotAllowed; AccessDenied if the owner is not the one that the client expects.
        """
        level = "object" if call.key else "bucket" if call.bucket else "service"
        call.check_acl(public=self._config.s3_public)
        call.check_owner()
        if call.header(ENCRYPTION) and not self._config.s3_encrypted:
            raise S3Error("NotImplemented", f"{ENCRYPTION}: nothing here says that the object tier encrypts")
        for at, method, header, handler in self._by_rdma:
            if (at, method) == (level, call.method) and call.header(header):
                is_post = method == "POST"
                operation = GET_CHUNKS if is_post else operation_of(level, method, call.query, copies=False)
                operation.check(call.query, call.http.headers.items())
                return operation, handler, True
        operation = operation_of(level, call.method, call.query, copies=bool(call.header("x-amz-copy-source")))
        operation.check(call.query, call.http.headers.items())
        return operation, self._handlers[operation.name], False

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self._backends.sweep()
            except Exception as error:  # another time
                logger().warning("blobs that nothing refers to could not be removed", exc_info=error)


def check_implemented(call: Call) -> None:
    """Refuse forms of browsers. Raises `S3Error` NotImplemented."""
    is_form = call.header("Content-Type").lower().startswith("multipart/form-data")
    if call.method == "POST" and is_form and not call.key and not call.query:
        raise S3Error("NotImplemented", "POST forms are not implemented here; presigned URLs are")


def _malformed(status: HTTPStatus, reason: str) -> web.Response:
    """Return the answer to a request that cannot be parsed, with AWS's code for long headers."""
    is_long = status is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    error = S3Error("RequestHeaderSectionTooLarge" if is_long else "BadRequest", reason)
    body = xml.error_document(error, "/", os.urandom(8).hex().upper())
    return web.Response(status=error.status, body=body, headers={"Content-Type": "application/xml"})


def _slow_down() -> S3Error:
    """Return a new error: one that is raised again and again would keep all requests that it has refused."""
    return S3Error("SlowDown", "Please reduce your request rate.", {"Retry-After": "1"})


def _failed(http: web.BaseRequest, error: Exception, request_id: str) -> web.Response:
    if isinstance(error, S3Error):
        return _error(http, error, request_id)
    failed = s3_error_of(error) if isinstance(error, QuireError) else S3Error("InternalError", "")
    if failed.status >= 500 and failed.code != "NotImplemented":
        logger().error("an S3 request failed", request_id=request_id, exc_info=error)
    if failed.code == "InternalError":
        failed.message = "We encountered an internal error. Please try again."
    return _error(http, failed, request_id)


def _error(http: web.BaseRequest, error: S3Error, request_id: str) -> web.Response:
    if http.method == "HEAD" or error.status == 304:
        return web.Response(status=error.status, headers=error.headers)
    body = xml.error_document(error, http.path, request_id)
    return web.Response(status=error.status, body=body, headers=error.headers | {"Content-Type": "application/xml"})


def _keep_large_blocks() -> None:
    """Have glibc reuse the memory of bodies: handing it back after each costs as many page faults as it has pages."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)
