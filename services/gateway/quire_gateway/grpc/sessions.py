"""Clients' sessions: many requests over one stream, and the resources of a connected client.

A session owns its leases and its running requests; with it they end. It outlives its stream by a time of grace: answers
are numbered and kept until the client has confirmed them. Requests of a client that reads or confirms slowly wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Final

import grpc

from quire.model.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MetadataUnavailable,
    NodeUnavailable,
    QuireError,
    Unauthenticated,
)
from quire.telemetry import background, logger
from quire.wire.session import METHODS, NAME_HEADER, RECEIVED_HEADER, SESSION
from quire.wire.status import status_of, trailers_of
from quire.wire.v1 import gateway_pb2 as pb
from quire_gateway.access.admission import Admission, Principal
from quire_gateway.access.revocation import revoked_error
from quire_gateway.config import GatewayConfig
from quire_gateway.errors import RequestsExhausted, SessionsExhausted
from quire_gateway.grpc.session import Release, Session, SessionStream
from quire_gateway.kv.contacted_nodes import touching
from quire_server.clock import Clock
from quire_server.core.shares import SharedBound
from quire_server.grpc_server import MeasuredService

_RETRY_S: Final = 0.05
_MISSED_RENEWALS: Final = 3
_AGE_REACHED: Final = 1.2
"""Of the connection age: gRPC ends connections a tenth sooner or later."""

_SERVICE: Final = "quire.v1.GatewayService"


class Sessions:
    """Sessions of this gateway's clients. `methods`: its gRPC frontend, whose methods answer the requests."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        methods: Any,
        admission: Admission,
        release: Release,
        clock: Clock,
    ) -> None:
        self._config = config
        self._methods = {field: getattr(methods, method.name) for field, method in METHODS.items()}
        self._admission = admission
        self._release = release
        self._clock = clock
        self._served = MeasuredService([_SERVICE], admission.audit.request, strangers=config.asks_for_tokens)
        self._sessions: dict[bytes, Session] = {}
        self._room = SharedBound(config.sessions_max)
        self._bytes = SharedBound(config.sessions_bytes_max)
        self._leaving = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def stats(self) -> dict[str, float]:
        return {"sessions": len(self._sessions)}

    async def serve(
        self, requests: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        """Serve one stream. Raises `Unauthenticated`; `NodeUnavailable` if this gateway stops."""
        principal = await self._admission.caller(context)
        name, received = _known(context)
        if self._leaving:
            raise NodeUnavailable("this gateway stops", retry_after_s=_RETRY_S)
        session, resumed = self._find(name, principal)
        session.refusal = None
        stream = session.attach(received if resumed else 0)
        self._watch_key(session)
        reader = asyncio.create_task(self._read(session, stream, requests), context=background())
        ageing = asyncio.create_task(self._leave_at_age(session, stream), context=background())
        try:
            yield pb.SessionResponse(
                heard=session.heard,
                opened=pb.SessionOpened(
                    session=session.token,
                    resumed=resumed,
                    renew_ms=self._config.session_renew_ms,
                    grace_ms=self._config.session_grace_ms,
                    takes_samples=True,
                ),
            )
            async for response in session.responses(stream):
                yield response
            if stream.error is not None:
                raise stream.error
        finally:
            reader.cancel()
            ageing.cancel()
            if session.stream is stream:
                session.unwatch()
                session.stream, session.absences = None, session.absences + 1
                if not self._leaving:
                    grace_ms = 0 if stream.over else self._config.session_grace_ms
                    self._spawn(self._end_after(session, session.absences, grace_ms))

    def leave(self) -> None:
        """This gateway stops. Leases stay, until they run out: their clients ask another gateway."""
        self._leaving = True
        for session in list(self._sessions.values()):
            session.leave()

    async def close(self) -> None:
        """Stop the remaining sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(
            *self._tasks, *(session.stop() for session in self._sessions.values()), return_exceptions=True
        )

    # ----

    def _find(self, token: bytes, principal: Principal) -> tuple[Session, bool]:
        session = self._sessions.get(token)
        if session is not None and session.context.principal == principal:
            session.context.principal = principal
            return session, True
        if not self._room.take(principal.tenant):
            raise SessionsExhausted(f"{len(self._sessions)} sessions are open", retry_after_s=1.0)
        session = Session(principal, self._answer, self._release, self._clock)
        self._sessions[session.token] = session
        return session, False

    async def _read(self, session: Session, stream: SessionStream, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Read the client's messages, while its stream is the session's."""
        watching = asyncio.create_task(self._watch(session, stream))
        try:
            async for message in requests:
                if session.stream is not stream:
                    return
                if message.HasField("renew"):
                    self._spawn(self._renew(session, stream, message.renew.authorization))
                elif message.HasField("close"):
                    stream.end()
                    return
                else:
                    session.take(message)
        except QuireError as error:
            stream.end(error)
        finally:
            watching.cancel()

    async def _renew(self, session: Session, stream: SessionStream, header: str) -> None:
        """Renew credentials concurrently with requests. If Redis does not answer, the next time counts."""
        previous = session.context.principal
        try:
            principal = await self._admission.authenticate(header)
            if principal.tenant != previous.tenant:
                raise Unauthenticated("these credentials are another client's", field="authorization")
        except MetadataUnavailable as error:
            logger().warning("credentials cannot be looked at", error=str(error))
        except QuireError as error:
            session.refuse(error)
        else:
            session.context.principal = principal
            session.renewed_s = self._clock.monotonic_s()
            if session.stream is stream:
                self._watch_key(session)

    def _watch_key(self, session: Session) -> None:
        """The key that the session's client has shown last."""
        session.unwatch()
        key = session.context.principal.key
        session.unwatch = self._admission.revocations.watch(key, lambda: session.refuse(revoked_error()))

    async def _watch(self, session: Session, stream: SessionStream) -> None:
        """A client that does not show its credentials again has its stream ended."""
        renew_s = self._config.session_renew_ms / 1000
        while True:
            await self._clock.sleep(renew_s)
            if self._clock.monotonic_s() - session.renewed_s > _MISSED_RENEWALS * renew_s:
                logger().warning("a session ends: its credentials were not shown again")
                stream.end()
                return

    async def _leave_at_age(self, session: Session, stream: SessionStream) -> None:
        """Once the connection takes no new streams: the next session is on another one, maybe to a new gateway."""
        if self._config.connection_age_s:
            await self._clock.sleep(_AGE_REACHED * self._config.connection_age_s)
            if session.stream is stream:
                session.leave()

    async def _end_after(self, session: Session, absence: int, grace_ms: int) -> None:
        if grace_ms:
            await self._clock.sleep(grace_ms / 1000)
        still_away = session.stream is None and session.absences == absence
        if still_away and self._sessions.pop(session.token, None) is not None:
            self._room.give_back(session.context.principal.tenant)
            await session.end()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine, context=background())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- requests

    async def _answer(self, session: Session, message: pb.SessionRequest) -> None:
        request, field = message.id, message.WhichOneof("request") or ""
        path = f"/{METHODS[field].containing_service.full_name}/{METHODS[field].name}" if field in METHODS else SESSION
        carrier = {"traceparent": message.traceparent} if message.traceparent else {}
        with self._served.request(path, carrier) as served, touching() as nodes:
            try:
                try:
                    answer = await self._ask(session, message, field)
                except TimeoutError as error:
                    served.failed(DeadlineExceeded(str(error)))
                    answer = _late(request)
                except Exception as error:
                    answer = _failed(request, served.failed(error))
                del message  # an answer may wait for its turn, and keeps no request in memory
                await session.put(answer)
            except asyncio.CancelledError:
                if session.is_unwanted(request):
                    stopped = pb.SessionStopped(nodes=sorted(nodes))
                    await session.put(pb.SessionResponse(id=request, last=True, stopped=stopped))
                raise

    async def _ask(self, session: Session, message: pb.SessionRequest, field: str) -> pb.SessionResponse:
        """Serve a request: put all answers but the last one, which is returned."""
        if field not in METHODS:
            raise InvalidRequest("this version has no such request", field="request")
        if session.refusal is not None:
            raise session.refusal
        if session.requests > self._config.session_requests_max:
            raise RequestsExhausted(f"{session.requests} requests of this session run", retry_after_s=_RETRY_S)
        async with asyncio.timeout(message.timeout_ms / 1000 or None):
            with self._buffered(session.context.principal.tenant, message.ByteSize()):
                return await self._call(session, message, field)

    @contextlib.contextmanager
    def _buffered(self, tenant: str, size: int) -> Iterator[None]:
        """Count a request's bytes while it is served. Raises `RequestsExhausted`."""
        if not self._bytes.take(tenant, size):
            reason = f"{self._bytes.taken} bytes of requests are not served yet, and this one has {size}"
            raise RequestsExhausted(reason, retry_after_s=_RETRY_S)
        try:
            yield
        finally:
            self._bytes.give_back(tenant, size)

    async def _call(self, session: Session, message: pb.SessionRequest, field: str) -> pb.SessionResponse:
        method, request = self._methods[field], getattr(message, field)
        if METHODS[field].server_streaming:
            async with contextlib.aclosing(method(request, session.context)) as answers:
                async for answer in answers:
                    if field == "retrieve" and answer.HasField("found") and answer.found.lease:
                        session.own(answer.found.lease, answer.found.lease_expires_ms)
                    await session.put(pb.SessionResponse(id=message.id, **{field: answer}))
            return pb.SessionResponse(id=message.id, last=True)
        answer = await method(request, session.context)
        if field == "lookup":
            for shard in (answer, *answer.other_shards):
                if shard.lease:
                    session.own(shard.lease, shard.lease_expires_ms)
        elif field == "release":
            session.disown(request.lease)
        return pb.SessionResponse(id=message.id, last=True, **{field: answer})


def _known(context: Any) -> tuple[bytes, int]:
    """The session that a stream takes up again, and how many of its answers the client has. Raises `InvalidRequest`."""
    metadata = dict(context.invocation_metadata() or ())
    name, received = metadata.get(NAME_HEADER, b""), metadata.get(RECEIVED_HEADER, "0")
    if not isinstance(name, bytes) or not str(received).isdecimal():
        raise InvalidRequest(f"{received!r} is no number of answers", field=RECEIVED_HEADER)
    return name, int(received)


def _late(request: int) -> pb.SessionResponse:
    """Build gRPC's error: the method has not answered, and its state at its deadline is unknown."""
    failure = pb.SessionError(status=grpc.StatusCode.DEADLINE_EXCEEDED.value[0], message="no answer in time")
    return pb.SessionResponse(id=request, last=True, error=failure)


def _failed(request: int, error: QuireError) -> pb.SessionResponse:
    failure = pb.SessionError(status=status_of(error).value[0], message=str(error), trailers=dict(trailers_of(error)))
    return pb.SessionResponse(id=request, last=True, error=failure)
