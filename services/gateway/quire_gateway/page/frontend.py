"""The page's HTTP frontend: its files, the cluster, time series and traces as JSON, and the gallery's pictures."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from aiohttp import BasicAuth, hdrs, web

from quire import __version__
from quire.model.errors import ImageMissing, QuireError
from quire.model.health import verdict_of
from quire.model.images import Rendering
from quire.model.nodes import StorageInfo
from quire.wire.credentials import page_token
from quire_gateway.access.audit import AuditLog
from quire_gateway.access.tenant_names import TenantNames
from quire_gateway.config import GatewayConfig
from quire_gateway.http.certificate import PublicCertificate
from quire_gateway.images.service import ImageService
from quire_gateway.page.history import History
from quire_gateway.page.traces import recent_requests, spans_of
from quire_gateway.ports import ClusterSpans, LookupCounts, MemberDirectory
from quire_server.clock import Clock
from quire_server.http_requests import HttpRequests
from quire_server.limits.connections import ASIDE_SHARE, KEEPALIVE_S, listen

_FOLDER: Final = Path(__file__).parent
_FILES: Final = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js", "/favicon.svg": "favicon.svg"}
_GALLERY: Final = 60
_ASKED: Final = "wants the page's token as password, as `quire page` prints it"
_CHALLENGE: Final = {hdrs.WWW_AUTHENTICATE: "Basic realm=quire"}
_THUMBNAIL: Final = Rendering("webp", 75, 160)
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PageFrontend:
    """Shows the cluster to who knows the page's token (`quire page`): HTTP basic authentication, any user."""

    def __init__(
        self,
        config: GatewayConfig,
        members: MemberDirectory,
        lookups: LookupCounts,
        names: TenantNames,
        spans: ClusterSpans,
        audit: AuditLog,
        images: ImageService,
        clock: Clock,
    ) -> None:
        self._config = config
        self._members = members
        self._lookups = lookups
        self._names = names
        self._spans = spans
        self._audit = audit
        self._images = images
        self._history = History(members.nodes, lambda: lookups.asked, clock)
        self._requests = HttpRequests("page", ASIDE_SHARE)
        self._tokens = [page_token(secret) for secret in config.secrets]
        self._runner: web.AppRunner | None = None
        self._certificate: PublicCertificate | None = None

    async def start(self) -> None:
        """Listen; nothing without an address. Over TLS where the gateway has a certificate."""
        config = self._config
        if not config.page_listen:
            return
        app = web.Application(middlewares=[self._guarded])
        for path in _FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/cluster.json", self._cluster)
        app.router.add_get("/history.json", self._series)
        app.router.add_get("/requests.json", self._recent_requests)
        app.router.add_get("/traces/{id:[0-9a-f]{32}}", self._trace)
        app.router.add_get("/images.json", self._gallery)
        app.router.add_get("/images/{id:(?s:.+)}", self._thumbnail)
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=config.stop_grace_s
        )
        await self._runner.setup()
        if config.tls_cert:
            self._certificate = PublicCertificate(config.tls_cert, config.tls_key)
            self._certificate.start()
        context = self._certificate.context if self._certificate is not None else None
        await listen(self._runner, config.page_listen, self._requests.connections, context)
        self._history.start()

    async def close(self) -> None:
        await self._history.close()
        if self._certificate is not None:
            await self._certificate.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        with self._requests.timed(request) as timed:
            if not self._is_known(request.headers.get(hdrs.AUTHORIZATION, "")):
                answer: web.StreamResponse = web.Response(status=401, text=_ASKED, headers=_CHALLENGE)
            else:
                try:
                    answer = await handler(request)
                except web.HTTPException as error:
                    answer = web.Response(status=error.status, text=error.reason)
                except QuireError as error:
                    answer = web.Response(status=404 if isinstance(error, ImageMissing) else 503, text=str(error))
            answer.headers.update(_HEADERS)
            timed.status = answer.status
            return answer

    def _is_known(self, header: str) -> bool:
        try:
            presented = BasicAuth.decode(header).password.encode()
        except ValueError:
            return False
        return any(hmac.compare_digest(presented, token.encode()) for token in self._tokens)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(_FOLDER / _FILES[request.path])

    async def _cluster(self, request: web.Request) -> web.StreamResponse:
        members, failed = await self._members.checked()
        names = await self._names.by_digest()
        nodes = [
            {
                "node": node.node_id,
                "role": node.role.value,
                "zone": node.location.zone,
                "link": node.about.link if isinstance(node.about, StorageInfo) else "",
                "incarnation": node.incarnation,
                "state": node.state.value,
                "is_away": node.is_away,
                "used_bytes": node.used_bytes,
                "capacity_bytes": node.capacity_bytes,
                "stats": dict(node.stats),
                "running": [
                    {
                        "delivery": delivery.short_id,
                        "tenant": names.get(delivery.tenant, delivery.tenant),
                        "layers": delivery.layers,
                        "layers_sent": delivery.layers_sent,
                        "bytes_per_layer": delivery.bytes_per_layer,
                        "rate_bytes_per_s": delivery.rate_bytes_per_s,
                        "running_ms": delivery.running_ms,
                    }
                    for delivery in node.running
                ],
            }
            for node in members
        ]
        health = {
            "verdict": verdict_of(failed).name,
            "checks": [check._asdict() | {"verdict": check.verdict.name} for check in failed],
        }
        about = {"gateway": self._config.node_id, "version": __version__, "health": health}
        return web.json_response({**about, "nodes": nodes, "namespaces": self._namespaces(names)})

    def _namespaces(self, names: Mapping[str, str]) -> dict[str, dict[str, object]]:
        """Return the hits and misses of each namespace by its tag, with its model and tenant."""
        counts, namespaces = self._lookups.asked, self._lookups.namespaces
        rows: dict[str, dict[str, object]] = {}
        for tag in {tag for tag, _ in counts}:
            rows[tag] = {result: counts.get((tag, result), 0) for result in ("hit", "miss")}
            if (namespace := namespaces.get(tag)) is not None:
                rows[tag] |= {
                    "model": namespace.model_id,
                    "version": namespace.weight_version,
                    "adapter": namespace.adapter,
                    "tenant": names.get(namespace.tenant, namespace.tenant),
                }
        return rows

    async def _recent_requests(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(recent_requests())

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        trace_id = request.match_info["id"]
        self._audit.act("ListSpans", trace_id, None)
        return web.json_response(await spans_of(trace_id, self._spans))

    async def _series(self, request: web.Request) -> web.StreamResponse:
        """The last hour, or with `?range=day` the last day."""
        return web.json_response(self._history.shown(day=request.query.get("range") == "day"))

    async def _gallery(self, request: web.Request) -> web.StreamResponse:
        """Images of the tenant without a name, of which there are none where tokens are asked for."""
        entries, _ = await self._images.page("", "", "", _GALLERY)
        images = [{"id": entry.image_id, "record_bytes": entry.record_bytes} for entry in entries]
        return web.json_response(images)

    async def _thumbnail(self, request: web.Request) -> web.StreamResponse:
        _, data = await self._images.get("", request.match_info["id"], _THUMBNAIL)
        return web.Response(body=data, content_type="image/webp")
