"""The HTTP frontend for images: bytes come by UCX into this process's memory."""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import asdict
from email.utils import formatdate
from pathlib import Path
from typing import IO, Final

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from quire.model.errors import ConditionFailed, DeadlineExceeded, ImageMissing, InvalidRequest, QuireError
from quire.model.images import ExpectedImage, ImageEntry
from quire.model.latents import encode_record
from quire.model.signed_urls import UrlClaim
from quire.telemetry import names
from quire_gateway.access.admission import Admission, Need, Principal
from quire_gateway.config import GatewayConfig
from quire_gateway.core.byte_ranges import NothingInRange, byte_range
from quire_gateway.core.limits import Taken
from quire_gateway.core.preconditions import Preconditions
from quire_gateway.http.certificate import PublicCertificate
from quire_gateway.http.latent_puts import (
    METADATA,
    OF_A_PUT,
    attributes_of,
    background_of,
    durability_of,
    flag,
    info_of,
    is_picture,
    number,
    values_of,
    weights_of,
)
from quire_gateway.http.origins import Origins
from quire_gateway.http.parameters import Parameters, named, without_version
from quire_gateway.http.problems import REQUEST_ID, Handler, malformed_problem, problems
from quire_gateway.images.pictures import Encoded, PictureUploads
from quire_gateway.images.service import ImageService
from quire_gateway.images.vaes import KnownVaes
from quire_server.http_requests import HttpRequests, send, traced
from quire_server.limits.connections import KEEPALIVE_S, listen
from quire_server.limits.turns import FairTurns

_BODY_TIMEOUT_S: Final = 60.0
_SLICE_BYTES: Final = 1 << 20
_PRINCIPAL: Final = web.RequestKey("principal", Principal)
_ADMITTED: Final = web.RequestKey("admitted", Taken)
_CLAIM: Final = web.RequestKey("claim", UrlClaim)
_PAGE_MAX: Final = 1000
_WITHOUT_CREDENTIALS: Final = ("/healthz", "/v1/openapi.json")
_OPENAPI: Final = Path(__file__).with_name("openapi.json")
_SIGNED_PATHS: Final = ("/v1/images/", "/v1/latents/")
_IMMUTABLE: Final = "public, max-age=31536000, immutable"
_RECORD_TYPE: Final = "application/x-quire-latent"


class ImagesFrontend:
    """The HTTP frontend for images.

    `PUT`, `GET`, `HEAD`, `DELETE /v1/images/{id}`, `GET`, `POST /v1/images`, `GET /v1/latents/{id}`, `GET /v1/vaes`,
    `GET /v1/openapi.json`, `GET /healthz`. Does nothing without an address to listen on. Raises `ConfigInvalid` for
    invalid presets.
    """

    def __init__(
        self,
        config: GatewayConfig,
        images: ImageService,
        pictures: PictureUploads,
        vaes: KnownVaes,
        admission: Admission,
    ) -> None:
        self._config = config
        self._images = images
        self._pictures = pictures
        self._vaes = vaes
        self._admission = admission
        self._requests = HttpRequests("images", malformed=malformed_problem)
        self._origins = Origins(config.http_origins)
        self._parameters = Parameters(config.images_presets, free=config.images_free_form)
        self._serving = FairTurns(config.http_requests_max)
        self._putting = FairTurns(max(1, config.http_requests_max // 4))
        self._runner: web.AppRunner | None = None
        self._certificate: PublicCertificate | None = None

    async def start(self) -> None:
        config = self._config
        if not config.http_listen and not config.http_tls_listen:
            return
        app = web.Application(
            client_max_size=self._config.http_body_max,
            middlewares=[self._measured, self._origins.middleware, problems, self._checked],
        )
        app.router.add_get("/healthz", self._health)
        app.router.add_put("/v1/images/{id:(?s:.+)}", self._put)
        app.router.add_get("/v1/images/{id:(?s:.+)}", self._get)
        app.router.add_delete("/v1/images/{id:(?s:.+)}", self._delete)
        app.router.add_get("/v1/images", self._list)
        app.router.add_post("/v1/images", self._delete_all)
        app.router.add_get("/v1/latents/{id:(?s:.+)}", self._latent)
        app.router.add_get("/v1/vaes", self._known_vaes)
        app.router.add_get("/v1/openapi.json", self._openapi)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=self._config.stop_grace_s,
            handler_cancellation=True,
        )
        await self._runner.setup()
        if config.http_listen:
            await listen(self._runner, config.http_listen, self._requests.connections)
        if config.http_tls_listen:
            self._certificate = PublicCertificate(config.tls_cert, config.tls_key)
            await listen(self._runner, config.http_tls_listen, self._requests.connections, self._certificate.context)
            self._certificate.start()

    async def close(self) -> None:
        if self._certificate is not None:
            await self._certificate.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _WITHOUT_CREDENTIALS:
            return await handler(request)
        with traced(request, names.GATEWAY_HTTP, request[REQUEST_ID], strangers=self._config.asks_for_tokens):
            try:
                principal = await self._principal(request)
                need = Need(write=request.method in ("PUT", "DELETE", "POST"), payload=request.content_length or 0)
                with self._admission.admit(principal, need) as admitted:
                    request[_PRINCIPAL], request[_ADMITTED] = principal, admitted
                    return await handler(request)
            except QuireError as error:
                self._admission.audit.request(f"{request.method} {request.path}", error)
                raise

    async def _principal(self, request: web.Request) -> Principal:
        """Authenticate by a signed URL, to read; else by the header."""
        claim = UrlClaim.read(request.path, request.query.items()) if request.method in ("GET", "HEAD") else None
        if claim is None:
            return await self._admission.authenticate(request.headers.get("Authorization", ""))
        if not request.path.startswith(_SIGNED_PATHS):
            raise InvalidRequest(f"is of {' and '.join(_SIGNED_PATHS)} alone", field="signature")
        request[_CLAIM] = claim
        return await self._admission.authenticate_url(claim)

    @web.middleware
    async def _measured(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request.

        A client that disconnects ends the making of an image; writes, and reads of a record, are completed.
        """
        with self._requests.timed(request) as answer:
            answering: Awaitable[web.StreamResponse] = handler(request)
            if request.method not in ("GET", "HEAD") or not request.path.startswith("/v1/images/"):
                answering = asyncio.shield(answering)
            response = await answering
            answer.status = response.status
            return response

    async def _put(self, request: web.Request) -> web.StreamResponse:
        """Store a latent or a picture.

        The body: safetensors, raw values, a record, a picture. Its type says which, the rest is in the query.
        """
        query = named(request.query.items(), OF_A_PUT)
        durability = durability_of(query.get("durability", "local"))
        tenant = request[_PRINCIPAL].tenant
        async with self._spooled(request) as spool, self._putting.turn(tenant):  # a slow client holds no turn
            body, kind = await asyncio.to_thread(spool.read), request.content_type
            record, encoded = await self._record_of(body, kind, query)
            attributes = attributes_of(request.headers, query)
            if encoded is not None:
                attributes = encoded.described(attributes)
            tenant, image_id = request[_PRINCIPAL].tenant, request.match_info["id"]
            expected = await self._expected(request, tenant, image_id)
            entry = await self._images.put_record(
                tenant,
                image_id,
                record,
                durability=durability,
                expected=expected,
                attributes=attributes,
                allow_unknown_vae=flag(query, "allow_unknown_vae", default=False),
            )
        answer: dict[str, object] = {
            "id": entry.image_id,
            "version": entry.version,
            "latent_sha256": entry.latent_sha256.hex(),
            "record_bytes": entry.record_bytes,
        }
        if encoded is not None:
            psnr_db = round(encoded.psnr_db, 2) if math.isfinite(encoded.psnr_db) else None
            answer["fidelity"] = {"psnr_db": psnr_db, "error_max": encoded.error_max}
            answer["first_of_several"] = encoded.first_of_several
        return web.json_response(answer, status=201, headers={"ETag": record_etag(entry)})

    async def _record_of(self, body: bytes, kind: str, query: Mapping[str, str]) -> tuple[bytes, Encoded | None]:
        """Return the latent record to store, and the loss of encoding a picture."""
        if kind == _RECORD_TYPE:
            return body, None
        if is_picture(kind, query, body):
            encoded = await self._pictures.encode(body, query.get("weights_sha256", ""), background_of(query))
            return encoded.record, encoded
        values, dtype = values_of(query, body, kind)
        info = info_of(query, values.shape, dtype, await self._vaes.find(weights_of(query)))
        return await asyncio.to_thread(encode_record, values, info), None

    async def _expected(self, request: web.Request, tenant: str, image_id: str) -> ExpectedImage:
        """Return the condition of a PUT on the latent's record: its ETag is that of /v1/latents.

        The catalogue checks it when the image is put. Raises `ConditionFailed`.
        """
        conditions = Preconditions.of(request.headers)
        if not conditions.of_write:
            return ExpectedImage()
        try:
            previous = await self._images.head(tenant, image_id)
        except ImageMissing:
            previous = None
        if not conditions.allows_write(record_etag(previous) if previous is not None else None):
            raise ConditionFailed("the image is another one, or there is one, or none", field="If-Match, If-None-Match")
        if previous is None:
            return ExpectedImage(absent=True)
        return ExpectedImage(record_sha256=previous.record_sha256)

    @contextlib.asynccontextmanager
    async def _spooled(self, request: web.Request) -> AsyncIterator[IO[bytes]]:
        """The body in a temporary file, from its start. Raises `DeadlineExceeded`."""
        size, limit = 0, self._config.http_body_max
        with await asyncio.to_thread(tempfile.TemporaryFile) as spool:
            try:
                async with asyncio.timeout(_BODY_TIMEOUT_S):
                    async for piece in request.content.iter_chunked(_SLICE_BYTES):
                        size += len(piece)
                        if size > limit:
                            raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=size)
                        await asyncio.to_thread(spool.write, piece)
            except TimeoutError:
                raise DeadlineExceeded(f"the body did not come within {_BODY_TIMEOUT_S:g} s", field="body") from None
            except (BadHttpMessage, web.RequestPayloadError) as error:
                raise InvalidRequest(f"not encoded as its headers say: {error}", field="body") from None
            await asyncio.to_thread(spool.seek, 0)
            yield spool

    async def _get(self, request: web.Request) -> web.StreamResponse:
        """An image, made on demand. HEAD is the same without the body."""
        claim, accept = request.get(_CLAIM), request.headers.get("Accept", "")
        query = claim.query if claim is not None else request.query.items()
        version, query = without_version(query)
        query = list(query)
        rendering = self._parameters.read(query, accept, signed=claim is not None)
        tenant, image_id = request[_PRINCIPAL].tenant, request.match_info["id"]
        conditions = Preconditions.of(request.headers)
        async with self._serving.turn(tenant):
            served, data = await self._images.get(tenant, image_id, rendering, conditions, version=version)
        headers = {"ETag": served.etag} | self._for_caches(request, served.entry, immutable=bool(version))
        if self._parameters.negotiates(query):
            headers["Vary"] = "Accept"
        if not data:
            return web.Response(status=304, headers=headers)
        headers |= {
            "Content-Type": rendering.media_type,
            "X-Quire-Source": served.source,
            "X-Quire-Decoder": served.decoder,
            "X-Quire-Latent": served.entry.latent_sha256.hex(),
            "X-Quire-Version": served.entry.version,
            "Accept-Ranges": "none" if served.entry.provenance else "bytes",
        } | {f"{METADATA}{name}": value for name, value in served.entry.metadata}
        headers["Server-Timing"] = ", ".join(
            f"{name};dur={spent / 1e3:.2f}" for name, spent in served.stages_us.items()
        )
        part = _wanted_part(request, served.entry, served.etag, len(data))
        if part is not None:
            headers["Content-Range"] = f"bytes {part[0]}-{part[1] - 1}/{len(data)}"
            data = data[slice(*part)]
        return await self._send(request, data, headers, 200 if part is None else 206)

    async def _send(
        self, request: web.Request, data: bytes, headers: dict[str, str], status: int = 200
    ) -> web.StreamResponse:
        """Bytes to a client, within the request: it counts until the last one has left."""
        request[_ADMITTED].take(len(data))
        headers |= {"Content-Length": str(len(data)), "X-Request-Id": request[REQUEST_ID]}
        response = web.StreamResponse(status=status, headers=headers)
        self._origins.mark(request, response)
        await response.prepare(request)
        try:
            await send(response, memoryview(data if request.method != "HEAD" else b""))
            await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client takes no bytes") from None
        return response

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        """Forget an image: 204, or 404 where there is none."""
        if not await self._images.delete(request[_PRINCIPAL].tenant, request.match_info["id"]):
            raise ImageMissing(f"there is no image {request.match_info['id']!r}", field="id")
        return web.Response(status=204)

    async def _delete_all(self, request: web.Request) -> web.StreamResponse:
        """Forget many.

        The body: `{"delete": [id, …]}`, a thousand at most. The answer says which there were and which not.
        """
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"no JSON: {error}", field="body") from None
        ids = body.get("delete") if isinstance(body, dict) and len(body) == 1 else None
        if (
            not isinstance(ids, list)
            or not all(isinstance(image_id, str) for image_id in ids)
            or not 0 < len(ids) <= _PAGE_MAX
        ):
            raise InvalidRequest(f'{{"delete": [id, …]}}, 1 to {_PAGE_MAX} of them', field="body")
        ids = list(dict.fromkeys(ids))
        deleted = await self._images.delete_all(request[_PRINCIPAL].tenant, ids)
        outcomes = dict(zip(ids, deleted, strict=True))
        answer = {
            "deleted": [image_id for image_id, was_there in outcomes.items() if was_there],
            "missing": [image_id for image_id, was_there in outcomes.items() if not was_there],
        }
        return web.json_response(answer)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        """A page of ids, in order. `next` is the `after` of the page behind it, null if this is the last."""
        parameters = named(request.query.items(), ("prefix", "after", "limit"))
        limit = min(_PAGE_MAX, max(1, number(parameters, "limit", _PAGE_MAX)))
        tenant, prefix = request[_PRINCIPAL].tenant, parameters.get("prefix", "")
        entries, next_id = await self._images.page(tenant, prefix, parameters.get("after", ""), limit)
        answer = {"images": [_listed(entry) for entry in entries], "next": next_id or None}
        return web.json_response(answer, headers={"Cache-Control": "private, no-cache"})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """That this gateway answers; `quire status` says of the cluster's members."""
        return web.json_response({"status": "ok"}, headers={"Cache-Control": "no-store"})

    async def _known_vaes(self, request: web.Request) -> web.StreamResponse:
        """Return the values that a latent's `weights_sha256` can have, and how they are computed."""
        vaes = sorted(self._vaes.by_weights.values(), key=lambda vae: (vae.name, vae.weights_sha256))
        answer = {"vaes": [asdict(vae) for vae in vaes], "digest": "sha256sum of the VAE's .safetensors file"}
        return web.json_response(answer, headers={"Cache-Control": "private, no-cache"})

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        """Return the OpenAPI document of this interface."""
        return web.FileResponse(_OPENAPI, headers={"Cache-Control": "public, max-age=3600"})

    async def _latent(self, request: web.Request) -> web.StreamResponse:
        """Return the stored latent record."""
        async with self._serving.turn(request[_PRINCIPAL].tenant):
            entry, record = await self._images.get_record(request[_PRINCIPAL].tenant, request.match_info["id"])
        headers = {"Content-Type": _RECORD_TYPE, "ETag": record_etag(entry)} | self._for_caches(request, entry)
        return await self._send(request, record, headers)

    def _for_caches(self, request: web.Request, entry: ImageEntry, *, immutable: bool = False) -> dict[str, str]:
        """Return the `Last-Modified` and `Cache-Control` headers.

        With tokens one URL is another image for each tenant: only the caller's own cache may keep it. A signed URL is
        one tenant's, for a time; and so is an image that expires. `immutable`: the meaning of the URL will not change.
        """
        configured = _IMMUTABLE if immutable else self._config.http_cache_control
        directives = [part.strip() for part in configured.split(",")]
        if entry.expires_ms:
            left_s = max(0, entry.expires_ms // 1000 - int(time.time()))
            directives = [_bounded(part, left_s) for part in directives]
        if (claim := request.get(_CLAIM)) is not None:
            left_s = max(0, claim.expires_s - int(time.time()))
            directives = [_bounded(part, left_s) for part in directives]
        elif self._config.asks_for_tokens:
            directives = ["private", *(part for part in directives if part != "public")]
        modified = formatdate(entry.created_ms // 1000, usegmt=True)
        return {"Last-Modified": modified, "Cache-Control": ", ".join(directives)}


def _listed(entry: ImageEntry) -> dict[str, object]:
    return {
        "id": entry.image_id,
        "version": entry.version,
        "bytes": entry.record_bytes,
        "height": entry.height,
        "width": entry.width,
        "created_ms": entry.created_ms,
        "expires_ms": entry.expires_ms or None,
        "metadata": dict(entry.metadata),
    }


def _wanted_part(request: web.Request, entry: ImageEntry, etag: str, size: int) -> tuple[int, int] | None:
    """Return start and end (exclusive) of a GET's range; None for all. Raises 416."""
    header = request.headers.get("Range", "") if request.method == "GET" else ""
    if not header or not Preconditions.allow_range(request.headers.get("If-Range", ""), etag, entry.created_ms / 1e3):
        return None
    try:
        return byte_range(header, size)
    except NothingInRange:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"}) from None


def _bounded(directive: str, most_s: int) -> str:
    """A directive of Cache-Control, with no time beyond `most_s`."""
    name, _, value = directive.partition("=")
    if name.lower() in ("max-age", "s-maxage") and value.isdigit():
        return f"{name}={min(int(value), most_s)}"
    return directive


def record_etag(entry: ImageEntry) -> str:
    """Strong: of the latent record."""
    return f'"{entry.record_sha256.hex()[:32]}"'
