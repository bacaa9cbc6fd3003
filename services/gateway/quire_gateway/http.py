"""The HTTP frontend for images: bytes come by UCX into this process's memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO, Any, Final

from aiohttp import web

from quire.model.durability import Durability
from quire.model.errors import DeadlineExceeded, ImageMissing, InvalidRequest, QuireError
from quire.model.images import MEDIA_TYPES, Rendering
from quire.model.latents import (
    LatentInfo,
    Normalisation,
    RecordInvalid,
    Vae,
    Values,
    encode_record,
    from_bytes,
    from_safetensors,
)
from quire.telemetry import logger, names
from quire.wire.status import status_of
from quire_gateway.admission import Admission, Need, Principal
from quire_gateway.config import GatewayConfig
from quire_gateway.core.limits import Taken
from quire_gateway.own_memory import OwnMemory
from quire_gateway.requests import HttpRequests, listen, send, traced

_HTTP_OF_GRPC: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 412,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_BODY_TIMEOUT_S: Final = 60.0
_SLICE_BYTES: Final = 1 << 20
_REQUEST_ID: Final = web.RequestKey("request_id", str)
_PRINCIPAL: Final = web.RequestKey("principal", Principal)
_ADMITTED: Final = web.RequestKey("admitted", Taken)
_RECORD_TYPE: Final = "application/x-quire-latent"
_FORMATS: Final = {media: name for name, media in MEDIA_TYPES.items()}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ImagesFrontend:
    """`PUT`, `GET`, `HEAD`, `DELETE /v1/images/{id}`, `GET /v1/images`, `GET /v1/latents/{id}`. Does nothing without an
    address to listen on."""

    def __init__(self, config: GatewayConfig, images: OwnMemory, admission: Admission) -> None:
        self._config = config
        self._images = images
        self._admission = admission
        self._requests = HttpRequests("images")
        self._serving = asyncio.Semaphore(config.http_requests_max)
        self._putting = asyncio.Semaphore(max(1, config.http_requests_max // 4))
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        if not self._config.http_listen:
            return
        app = web.Application(
            client_max_size=self._config.http_body_max, middlewares=[self._measured, _errors_as_json, self._checked]
        )
        app.router.add_put("/v1/images/{id}", self._put)
        app.router.add_get("/v1/images/{id}", self._get)
        app.router.add_delete("/v1/images/{id}", self._delete)
        app.router.add_get("/v1/images", self._list)
        app.router.add_get("/v1/latents/{id}", self._latent)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=self._config.stop_grace_s)
        await self._runner.setup()
        await listen(self._runner, self._config.http_listen)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        with traced(request, names.GATEWAY_HTTP, request[_REQUEST_ID]):
            principal = await self._admission.authenticate(request.headers.get("Authorization", ""))
            need = Need(write=request.method in ("PUT", "DELETE"), payload=request.content_length or 0)
            with self._admission.admit(principal, need) as admitted:
                request[_PRINCIPAL], request[_ADMITTED] = principal, admitted
                return await handler(request)

    @web.middleware
    async def _measured(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        with self._requests.timed(request) as answer:
            response = await handler(request)
            answer.status = response.status
            return response

    async def _put(self, request: web.Request) -> web.StreamResponse:
        """Body: safetensors, raw values, or a record. What it is stands in the type, the rest in the query."""
        durability = _durability(request.query.get("durability", "local"))
        async with self._spooled(request) as spool, self._putting:  # a slow client holds no turn
            body, kind = await asyncio.to_thread(spool.read), request.content_type
            if kind == _RECORD_TYPE:
                record = body
            else:
                values, dtype = _values(request, body, kind)
                info = _info(request.query, values.shape, dtype)
                record = await asyncio.to_thread(encode_record, values, info)
            entry = await self._images.put_record(
                request.match_info["id"], record, durability=durability, tenant=request[_PRINCIPAL].tenant
            )
        answer = {"id": entry.image_id, "latent_sha256": entry.latent_sha256.hex(), "record_bytes": entry.record_bytes}
        return web.json_response(answer, status=201)

    @contextlib.asynccontextmanager
    async def _spooled(self, request: web.Request) -> AsyncIterator[IO[bytes]]:
        """The body in a temporary file, from its start. Raises `DeadlineExceeded`."""
        size, most = 0, self._config.http_body_max
        with await asyncio.to_thread(tempfile.TemporaryFile) as spool:
            try:
                async with asyncio.timeout(_BODY_TIMEOUT_S):
                    async for piece in request.content.iter_chunked(_SLICE_BYTES):
                        size += len(piece)
                        if size > most:
                            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=size)
                        await asyncio.to_thread(spool.write, piece)
            except TimeoutError:
                raise DeadlineExceeded(f"the body did not come within {_BODY_TIMEOUT_S:g} s", field="body") from None
            await asyncio.to_thread(spool.seek, 0)
            yield spool

    async def _get(self, request: web.Request) -> web.StreamResponse:
        rendering = _rendering(request)
        headers = {"Vary": "Accept", "Cache-Control": "public, no-cache"}
        async with self._serving:
            if request.method == "HEAD":
                entry, etag = await self._images.etag(request.match_info["id"], rendering)
                headers |= {"ETag": etag, "Content-Type": rendering.media_type}
                return web.Response(headers=headers | {"X-Quire-Latent": entry.latent_sha256.hex()})
            wanted = request.headers.get("If-None-Match", "")
            served, data = await self._images.get(request.match_info["id"], rendering, _first_etag(wanted))
        headers["ETag"] = served.etag
        if not data:
            return web.Response(status=304, headers=headers)
        headers |= {
            "Content-Type": rendering.media_type,
            "X-Quire-Source": served.source,
            "X-Quire-Decoder": served.decoder,
        }
        headers["Server-Timing"] = ", ".join(
            f"{name};dur={spent / 1e3:.2f}" for name, spent in served.stages_us.items()
        )
        return await self._send(request, data, headers)

    async def _send(self, request: web.Request, data: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """Bytes to a client, within the request: it counts until the last one has left."""
        request[_ADMITTED].take(len(data))
        headers |= {"Content-Length": str(len(data)), "X-Request-Id": request[_REQUEST_ID]}
        response = web.StreamResponse(headers=headers)
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
        if not await self._images.delete(request.match_info["id"]):
            raise ImageMissing(f"there is no image {request.match_info['id']!r}", field="id")
        return web.Response(status=204)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        prefix, limit = request.query.get("prefix", ""), min(1000, max(1, _number(request.query, "limit", 1000)))
        entries = []
        async for entry in self._images.list(prefix):
            entries.append(
                {"id": entry.image_id, "bytes": entry.record_bytes, "height": entry.height, "width": entry.width}
            )
            if len(entries) >= limit:
                break
        return web.json_response({"images": entries})

    async def _latent(self, request: web.Request) -> web.StreamResponse:
        async with self._serving:
            record = await self._images.get_record(request.match_info["id"])
        return await self._send(request, record, {"Content-Type": _RECORD_TYPE})


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """{"error", "message", "field", "request_id"}; a stack trace stays here."""
    request_id = request.headers.get("X-Request-Id", "")[:64] or os.urandom(8).hex()
    request[_REQUEST_ID] = request_id
    try:
        response = await handler(request)
    except QuireError as error:
        status = _HTTP_OF_GRPC.get(status_of(error).name, 500)
        response = _json_error(status, error.code(), error.message, error.field, request_id)
        if error.retry_after_s:
            response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        if status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
    except ConnectionError:
        raise  # the client went away
    except web.HTTPException as error:
        response = _json_error(error.status, type(error).__name__, error.reason, "", request_id)
    except Exception as error:
        logger().error("a request failed unexpectedly", path=request.path, request_id=request_id, exc_info=error)
        response = _json_error(500, "InternalError", "the gateway's log has the details", "", request_id)
    response.headers["X-Request-Id"] = request_id
    return response


def _json_error(status: int, code: str, message: str, field: str, request_id: str) -> web.Response:
    body = {"error": code, "message": message, "field": field, "request_id": request_id}
    return web.json_response(body, status=status)


def _values(request: web.Request, body: bytes, kind: str) -> tuple[Values, str]:
    if kind == "application/octet-stream" and "shape" in request.query:
        dtype = request.query.get("dtype", "float16")
        try:
            shape = tuple(int(size) for size in request.query["shape"].split(","))
        except ValueError:
            raise RecordInvalid(f"{request.query['shape']!r} is not channels,height,width", field="shape") from None
        if len(shape) == 4 and shape[0] == 1:
            shape = shape[1:]
        return from_bytes(body, shape, dtype), dtype  # type: ignore[arg-type]
    return from_safetensors(body)


def _info(query: Any, shape: tuple[int, ...], dtype: str) -> LatentInfo:
    """From the query, with the names of diffusers' remote_decode: scaling_factor, shift_factor, height, width, …"""
    scale = _number(query, "vae_scale_factor", 8)
    normalisation = Normalisation(
        _float(query, "scaling_factor", 1.0),
        _float(query, "shift_factor", 0.0),
        undone=query.get("do_scaling", "true").lower() in ("false", "0", "no"),
    )
    vae = Vae(query.get("vae", ""), query.get("revision", ""), query.get("weights_sha256", ""))
    return LatentInfo(
        shape,  # type: ignore[arg-type]
        dtype,
        vae,
        _number(query, "height", shape[1] * scale),
        _number(query, "width", shape[2] * scale),
        normalisation,
    )


def _rendering(request: web.Request) -> Rendering:
    """`format`, else the first type of Accept that we have, else PNG."""
    name = request.query.get("format", "") or _accepted(request.headers.get("Accept", ""))
    return Rendering(name, _number(request.query, "quality", 0), _number(request.query, "width", 0))


def _accepted(accept: str) -> str:
    """Best by q, then by the client's order."""
    best, best_q = "png", 0.0
    for part in accept.split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        q = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    q = float(parameter[2:])
                except ValueError:
                    q = 0.0
        if media in _FORMATS and q > best_q:
            best, best_q = _FORMATS[media], q
    return best


def _first_etag(header: str) -> str:
    """Strong comparison: a weak tag never matches."""
    tag = header.split(",")[0].strip()
    return "" if tag.startswith("W/") else tag


def _durability(name: str) -> Durability:
    try:
        return Durability[name.upper()]
    except KeyError:
        raise InvalidRequest(f"{name!r}; memory, local, replicated or object", field="durability") from None


def _number(query: Any, name: str, default: int) -> int:
    try:
        value = int(query.get(name, default))
    except ValueError:
        raise InvalidRequest(f"{query[name]!r} is no number", field=name) from None
    if value < 0:
        raise InvalidRequest(f"{value} is negative", field=name)
    return value


def _float(query: Any, name: str, default: float) -> float:
    try:
        return float(query.get(name, default))
    except ValueError:
        raise InvalidRequest(f"{query[name]!r} is no number", field=name) from None
