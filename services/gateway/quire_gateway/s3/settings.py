"""Requests on the settings of a bucket: versioning, CORS, lifecycle, tags, encryption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aiohttp import web

from quire.model.buckets import Versioning
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3 import cors, lifecycle, xml
from quire_gateway.s3.backend import ObjectBackend
from quire_gateway.s3.backends import Backends
from quire_gateway.s3.call import Call
from quire_gateway.s3.objects import xml_answer
from quire_gateway.s3.tagging import BUCKET_TAGS_MAX, read_tagging, tagging_document
from quire_server.redis.keys.access import AccessLevel

_TAGGING: Final = "tagging"
_VERSIONING: Final = "versioning"
_MISSING: Final = {
    cors.SETTING: ("NoSuchCORSConfiguration", "The CORS configuration does not exist"),
    lifecycle.SETTING: ("NoSuchLifecycleConfiguration", "The lifecycle configuration does not exist"),
    _TAGGING: ("NoSuchTagSet", "The TagSet does not exist"),
}
_DEFAULT: Final = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": None}, "BucketKeyEnabled": None}


class BucketSettings:
    """Every method answers one kind of request."""

    def __init__(self, backends: Backends, encrypted: bool) -> None:
        """`encrypted`: the operator declares that the object tier encrypts its bytes."""
        self._backends = backends
        self._encrypted = encrypted

    async def versioning(self, call: Call) -> web.StreamResponse:
        """GetBucketVersioning: nothing, unless it was enabled once."""
        await self._backends.backend(call.caller, call.bucket, "", AccessLevel.READ).check_there()
        tenant = call.caller.tenant_of(call.bucket)
        status = (await self._backends.buckets.settings(tenant, call.bucket)).get(_VERSIONING, b"").decode()
        return xml_answer(xml.document("VersioningConfiguration", [("Status", status)] if status else []))

    async def set_versioning(self, call: Call) -> web.StreamResponse:
        """PutBucketVersioning: Enabled or Suspended."""
        tree = xml.read_tree(await call.xml(), "VersioningConfiguration", {"Status": None, "MfaDelete": None})
        if any(text.strip() != "Disabled" for text in xml.texts(tree, "MfaDelete")):
            raise S3Error("NotImplemented", "MfaDelete is not implemented here")
        status = "".join(xml.texts(tree, "Status")).strip()
        if status not in (Versioning.ENABLED.value, Versioning.SUSPENDED.value):
            raise S3Error("MalformedXML", "Status is Enabled or Suspended")
        return await self._set(call, _VERSIONING, status.encode())

    async def cors(self, call: Call) -> web.StreamResponse:
        """GetBucketCors."""
        return await self._stored(call, cors.SETTING)

    async def set_cors(self, call: Call) -> web.StreamResponse:
        """PutBucketCors."""
        return await self._set_document(call, cors.SETTING, lambda body: cors.read_cors(body)[1])

    async def delete_cors(self, call: Call) -> web.StreamResponse:
        """DeleteBucketCors."""
        return await self._set(call, cors.SETTING, b"", status=204)

    async def lifecycle(self, call: Call) -> web.StreamResponse:
        """GetBucketLifecycleConfiguration."""
        return await self._stored(call, lifecycle.SETTING)

    async def set_lifecycle(self, call: Call) -> web.StreamResponse:
        """PutBucketLifecycleConfiguration: expiration, of older versions too, and unfinished uploads."""
        return await self._set_document(call, lifecycle.SETTING, lambda body: lifecycle.read_lifecycle(body)[1])

    async def delete_lifecycle(self, call: Call) -> web.StreamResponse:
        """DeleteBucketLifecycle."""
        return await self._set(call, lifecycle.SETTING, b"", status=204)

    async def tagging(self, call: Call) -> web.StreamResponse:
        """GetBucketTagging."""
        return await self._stored(call, _TAGGING)

    async def set_tagging(self, call: Call) -> web.StreamResponse:
        """PutBucketTagging."""
        return await self._set_document(
            call, _TAGGING, lambda body: tagging_document(read_tagging(body, BUCKET_TAGS_MAX)), status=204
        )

    async def delete_tagging(self, call: Call) -> web.StreamResponse:
        """DeleteBucketTagging."""
        return await self._set(call, _TAGGING, b"", status=204)

    async def encryption(self, call: Call) -> web.StreamResponse:
        """GetBucketEncryption: AES256 of every bucket, where the object tier encrypts."""
        await self._backend(call, AccessLevel.READ).check_there()
        self._check_encrypted()
        rule: list[tuple[str, Any]] = [("ApplyServerSideEncryptionByDefault", [("SSEAlgorithm", "AES256")])]
        return xml_answer(xml.document("ServerSideEncryptionConfiguration", [("Rule", rule)]))

    async def set_encryption(self, call: Call) -> web.StreamResponse:
        """PutBucketEncryption: AES256, which every bucket has."""
        self._check_encrypted()
        tree = xml.read_tree(await call.xml(), "ServerSideEncryptionConfiguration", {"Rule": _DEFAULT})
        for rule in xml.trees(tree, "Rule"):
            for default in xml.trees(rule, "ApplyServerSideEncryptionByDefault"):
                if xml.texts(default, "SSEAlgorithm") != ["AES256"]:
                    raise S3Error("NotImplemented", "Of encryptions there is only AES256, of the object tier")
        await self._backend(call).check_there()
        return web.Response()

    async def delete_encryption(self, call: Call) -> web.StreamResponse:
        """DeleteBucketEncryption: back to AES256, as every bucket has."""
        self._check_encrypted()
        await self._backend(call).check_there()
        return web.Response(status=204)

    def _check_encrypted(self) -> None:
        if not self._encrypted:
            raise S3Error("NotImplemented", "Nothing here says that the object tier encrypts (s3_encrypted)")

    def _backend(self, call: Call, level: AccessLevel = AccessLevel.ADMIN) -> ObjectBackend:
        return self._backends.object_backend(call.caller, call.bucket, "", level)

    async def _stored(self, call: Call, name: str) -> web.StreamResponse:
        backend = self._backend(call, AccessLevel.READ)
        value = (await self._backends.buckets.settings(*backend.place)).get(name)
        if value is None:
            await backend.check_there()
            raise S3Error(*_MISSING[name])
        return xml_answer(value)

    async def _set_document(
        self, call: Call, name: str, read: Callable[[bytes], bytes], status: int = 200
    ) -> web.StreamResponse:
        await self._backend(call).check_there()
        return await self._set(call, name, read(await call.xml()), status)

    async def _set(self, call: Call, name: str, value: bytes, status: int = 200) -> web.StreamResponse:
        backend = self._backend(call)
        if not await self._backends.buckets.set(*backend.place, name, value):
            raise S3Error("NoSuchBucket", "The specified bucket does not exist")
        return web.Response(status=status)
