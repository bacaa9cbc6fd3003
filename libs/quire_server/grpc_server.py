"""Life of a gRPC server: health, reflection, traces, errors, a graceful stop on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry import trace

from quire.model import errors
from quire.telemetry import counter, entry, logger, meter, names, tracer
from quire.wire.channels import MESSAGE_BYTES_MAX
from quire.wire.status import status_of, trailers_of
from quire.wire.tls import Tls
from quire.wire.v1.trace_pb2_grpc import add_TraceServiceServicer_to_server
from quire.wire.version import check_metadata
from quire_server import tasks, trace_service
from quire_server.access.callers import CheckRole, check_caller, check_certificate, is_of_any_member
from quire_server.access.unauthenticated import SideServices, first_message
from quire_server.core.shares import SharedBound
from quire_server.limits.connections import HANDSHAKE_S, LISTENER_SHARE, connections_max
from quire_server.readiness import readiness

_POOL: Final = descriptor_pool.Default()  # type: ignore[no-untyped-call, unused-ignore]
_OUTCOMES: Final = ("ok", "refused", "failed")
_FAILURES: Final = ("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNKNOWN")
_UNFIT_MAX: Final = 256
_SLOW_STOP_S: Final = 8.0
_IDLE_MS: Final = 600_000
_PING_MS: Final = 60_000
_PING_TIMEOUT_MS: Final = 20_000
_ROUNDS: Final = 50
_RETRY_S: Final = 0.1
_UNSHARED_MAX: Final = 1024
"""Calls above the bound that tenants share: those that are being authenticated or refused."""
_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    # A peer that does not answer is disconnected.
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


class Authenticated(Protocol):
    """A caller whose credentials are valid."""

    @property
    def tenant(self) -> str: ...


class Server:
    """A gRPC server with the common parts of Quire's services.

    `services`: their full names, for health and reflection. `address`: host:port, port 0 for any; `port` tells. With
    `tls` only members of the cluster are served, by the name in their certificates, and of these `callers`; if it is
    `public`, all clients. `connection_age_s`: after about that time a connection takes no new requests, and those that
    run go on; clients connect anew, to whatever serves then. 0 for never. `secrets`: of the cluster; gateways that know
    one may read the spans of this process. `authenticate`: refuses a caller by the headers of a call, before its
    request is read; tenants then share `requests_max`, and `sessions_max` sessions come on top. Without it, and without
    TLS, members are served alone, by a header with their role and its proof; `accept_unproven`: callers without that
    header, too. `strangers`: callers are tenants, whose traces are linked and not continued. `share`: of the process'
    descriptors, for connections.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[str],
        *,
        requests_max: int = 1024,
        sessions_max: int = 0,
        tls: Tls | None = None,
        public: bool = False,
        connection_age_s: float = 0.0,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        secrets: Sequence[bytes] = (),
        authenticate: Callable[[Any], Awaitable[Authenticated]] | None = None,
        accept_unproven: bool = False,
        strangers: bool = False,
        share: float = LISTENER_SHARE,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._services = [*services, trace_service.NAME, health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._health = health.aio.HealthServicer()
        check: CheckRole | None = None
        if tls is not None:
            check = None if public else check_certificate
        elif secrets and authenticate is None:
            check = partial(check_caller, tuple(secrets), accept_unproven)
        served, room = MeasuredService(services, on_failure, strangers=strangers), SharedBound(requests_max)
        edge = _EdgeInterceptor(services, authenticate, check, served, room)
        options = [
            *_OPTIONS,
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_allowed_incoming_connections", connections_max(share)),
            ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_S)),
        ]
        if authenticate is not None:  # members watch each other's connections, which may be without calls
            options.append(("grpc.max_connection_idle_ms", _IDLE_MS))
        if connection_age_s:
            options.append(("grpc.max_connection_age_ms", round(1000 * connection_age_s)))
        self.grpc = grpc.aio.server(
            interceptors=[edge],
            options=options,
            maximum_concurrent_rpcs=requests_max + (sessions_max + _UNSHARED_MAX if authenticate is not None else 0),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)  # type: ignore[no-untyped-call, unused-ignore]
        add_TraceServiceServicer_to_server(trace_service.TraceServicer(secrets), self.grpc)
        reflection.enable_server_reflection(self._services, self.grpc)
        self._address = address
        self._credentials = tls.server_credentials(clients_too=not public) if tls is not None else None
        self.port = 0
        """Where it listens, once it has been started."""

    async def start(self) -> None:
        """Listen, and report healthy. Raises `ConfigInvalid` for an address that is invalid, or is taken."""
        try:
            if self._credentials is None:
                self.port = self.grpc.add_insecure_port(self._address)
            else:
                self.port = self.grpc.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            raise errors.ConfigInvalid(f"cannot listen on {self._address!r}: {error}") from None
        await self.grpc.start()
        await self._report(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, drain_s: float) -> None:
        """Report unhealthy, and serve clients that have not noticed yet for `drain_s`."""
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        await asyncio.sleep(drain_s)

    async def stop(self, grace_s: float, stopping: Callable[[], None] = lambda: None) -> None:
        """Refuse new requests, let running ones finish for `grace_s`. `stopping` is called as soon as none is taken."""
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        for _ in range(_ROUNDS):  # what has arrived and was not taken up yet would be cancelled
            await asyncio.sleep(0)
        stop = asyncio.create_task(self.grpc.stop(grace_s))
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
        stopping()
        await stop

    async def _report(self, status: Any) -> None:
        readiness.serve(status == health_pb2.HealthCheckResponse.SERVING)
        for name in ("", *self._services):
            await self._health.set(name, status)


async def until_signalled(stop_within_s: float) -> str:
    """Return on SIGTERM or SIGINT, with its name.

    `stop_within_s` after it the process ends, whatever still hangs; its log then shows where.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _settle, stopped, number.name)
    name = await stopped
    faulthandler.dump_traceback_later(stop_within_s, exit=True)
    loop.call_later(_SLOW_STOP_S, tasks.say_where, "the stop takes long")
    return name


def _settle(stopped: asyncio.Future[str], name: str) -> None:
    if not stopped.done():
        stopped.set_result(name)


OnFailure = Callable[[str, Exception], None]


class Serving:
    """A request that is being answered."""

    def __init__(self, method: str, span: trace.Span, on_failure: OnFailure | None = None) -> None:
        self.code = grpc.StatusCode.OK.name
        self._on_failure = on_failure
        self._method = method
        self._span = span

    def failed(self, error: Exception) -> errors.QuireError:
        """Return the caller's error for an exception. The log has the unexpected ones."""
        if not isinstance(error, errors.QuireError):
            logger().error("a request failed unexpectedly", method=self._method, exc_info=error)
            error = errors.InternalError("internal error; the service's log has the details")
        self.code = status_of(error).name
        self._span.set_attribute("rpc.status_code", self.code)
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, error.code()))
        if self._on_failure is not None:
            self._on_failure(self._method, error)
        return error


class MeasuredService:
    """Measures the requests of a service: a span for each, in the caller's trace, its time, and its outcome.

    Outcomes are `ok`, `refused` (by the caller's fault) or `failed`; methods of `services` have counts from the start.
    """

    def __init__(
        self, services: Sequence[str], on_failure: OnFailure | None = None, *, strangers: bool = False
    ) -> None:
        """`on_failure`: called with the method and the error of each request that fails.

        `strangers`: callers are tenants, whose traces are linked.
        """
        self.on_failure = on_failure
        self._strangers = strangers
        methods = [method.full_name for service in services for method in _POOL.FindServiceByName(service).methods]
        kinds = [{"rpc.method": _path(path), "outcome": outcome} for path in methods for outcome in _OUTCOMES]
        self._requests = counter(names.RPC_REQUESTS, "1", "requests by what came of them", kinds)
        self._duration = meter().create_histogram(
            names.RPC_DURATION, "s", "time to answer a request", explicit_bucket_boundaries_advisory=names.SECONDS
        )

    @contextlib.contextmanager
    def request(self, method: str, carrier: Mapping[str, str]) -> Iterator[Serving]:
        """While it is answered. `method`: /package.Service/Name; `carrier`: the headers that name the trace."""
        service, _, name = method.lstrip("/").rpartition("/")
        attributes = {"rpc.system.name": "grpc", "rpc.service": service, "rpc.method": name}
        started_s, serving = time.perf_counter(), None
        context, links = entry(carrier, strangers=self._strangers)
        try:
            with tracer().start_as_current_span(
                f"{service}/{name}",
                context,
                trace.SpanKind.SERVER,
                attributes,
                links,
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                serving = Serving(method, span, self.on_failure)
                yield serving
        except BaseException:  # the caller hung up, unless it was told of an error
            if serving is not None and serving.code == grpc.StatusCode.OK.name:
                serving.code = grpc.StatusCode.CANCELLED.name
            raise
        finally:
            code = serving.code if serving is not None else grpc.StatusCode.UNKNOWN.name
            recorded = {"rpc.method": method.lstrip("/"), "rpc.response.status_code": code}
            self._duration.record(time.perf_counter() - started_s, recorded)
            self._requests.add(1, {"rpc.method": recorded["rpc.method"], "outcome": _outcome(code)})


def _path(full_name: str) -> str:
    """Return the path by which a method is called: package.Service/Name."""
    service, _, name = full_name.rpartition(".")
    return f"{service}/{name}"


def _outcome(code: str) -> str:
    if code == grpc.StatusCode.OK.name:
        return "ok"
    return "failed" if code in _FAILURES else "refused"


class _EdgeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """A span for each request, in the caller's trace; every exception becomes a status, never a stack trace.

    A stream in both directions is no request: it carries some.
    """

    def __init__(
        self,
        services: Sequence[str],
        authenticate: Callable[[Any], Awaitable[Authenticated]] | None,
        check_role: CheckRole | None,
        served: MeasuredService,
        room: SharedBound,
    ) -> None:
        """`check_role`: refuses members whose role may not call a method. `room`: for authenticated requests."""
        self._authenticate = authenticate
        self._guarded = tuple(f"/{service}/" for service in services) if authenticate is not None else ()
        self._aside = SideServices(_abort)
        self._check_role = check_role
        self._unfit: set[str] = set()
        self._served = served
        self._room = room

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        if method.startswith(("/grpc.health", "/grpc.reflection")):
            return self._aside.bounded(handler, method)
        carrier = {str(key): str(value) for key, value in handler_call_details.invocation_metadata or ()}
        serializers = handler.request_deserializer, handler.response_serializer
        guarded = method.startswith(self._guarded)
        if handler.unary_unary:
            unary = self._unary(handler.unary_unary, method, carrier, guarded)
            new_handler = grpc.stream_unary_rpc_method_handler if guarded else grpc.unary_unary_rpc_method_handler
            return new_handler(unary, *serializers)
        if handler.unary_stream:
            streamed = self._stream(handler.unary_stream, method, carrier, guarded)
            new_handler = grpc.stream_stream_rpc_method_handler if guarded else grpc.unary_stream_rpc_method_handler
            handler = new_handler(streamed, *serializers)
            return self._aside.bounded(handler, method) if is_of_any_member(method) else handler
        duplex = self._duplex(handler.stream_stream, method, carrier)
        return grpc.stream_stream_rpc_method_handler(duplex, *serializers)

    def _unary(
        self, behaviour: Callable[..., Awaitable[Any]], method: str, carrier: dict[str, str], guarded: bool
    ) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            with self._served.request(method, carrier) as serving:
                try:
                    self._check(method, carrier, context)
                    if not guarded:
                        return await behaviour(request, context)
                    async with self._let_in(request, context) as admitted:
                        return await behaviour(admitted, context)
                except Exception as error:
                    await _abort(context, serving.failed(error))

        return call

    def _stream(
        self, behaviour: Callable[..., AsyncIterator[Any]], method: str, carrier: dict[str, str], guarded: bool
    ) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._served.request(method, carrier) as serving:
                try:
                    self._check(method, carrier, context)
                    async with (
                        self._let_in(request, context) if guarded else contextlib.nullcontext(request) as admitted
                    ):
                        async for response in behaviour(admitted, context):
                            yield response
                except Exception as error:
                    await _abort(context, serving.failed(error))

        return call

    def _duplex(
        self, behaviour: Callable[..., AsyncIterator[Any]], method: str, carrier: dict[str, str]
    ) -> Callable[..., Any]:
        async def call(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            try:
                self._check(method, carrier, context)
                async for response in behaviour(requests, context):
                    yield response
            except Exception as error:
                await _abort(context, Serving(method, trace.INVALID_SPAN, self._served.on_failure).failed(error))

        return call

    @contextlib.asynccontextmanager
    async def _let_in(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Yield the request of a caller that its headers authenticate, within its tenant's share of requests."""
        assert self._authenticate is not None
        tenant = (await self._authenticate(context)).tenant
        if not self._room.take(tenant):
            raise errors.TooManyRequests(f"{self._room.taken} requests are running", retry_after_s=_RETRY_S)
        try:
            yield await first_message(requests)
        finally:
            self._room.give_back(tenant)

    def _check(self, method: str, carrier: dict[str, str], context: Any) -> None:
        """Check the caller's protocol and role.

        Raises `NotAllowed`; `VersionUnsupported`, `Unauthenticated` and `SecretDiffers`, logged once for each peer.
        """
        try:
            check_metadata(carrier)
            if self._check_role is not None:
                self._check_role(method, carrier, context)
        except (errors.VersionUnsupported, errors.Unauthenticated, errors.SecretDiffers) as error:
            peer = str(context.peer()).rpartition(":")[0]
            if peer not in self._unfit and len(self._unfit) < _UNFIT_MAX:
                self._unfit.add(peer)
                logger().error("a caller cannot be used", peer=peer, error=str(error))
            raise


async def _abort(context: Any, error: errors.QuireError) -> None:
    await context.abort(status_of(error), str(error), trailers_of(error))
