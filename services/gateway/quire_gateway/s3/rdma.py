"""Requests whose bytes go by RDMA: HTTP carries the control, UCX the payload (ObjectCache, §3.2 and §4.1).

    GET, PUT /bucket/key   x-amz-rdma-token     one object: an ordinary one staged here (S3RDMA Buffer), a KV chunk
                                                (/quire-kv/NAMESPACE/KEY) between its storage node and the client
                                                (S3RDMA Direct)
    GET, POST /quire-kv    x-quire-descriptor   many chunks in one request: chunkwise in one burst (S3RDMA Batch) or
                                                assembled layer by layer (S3RDMA Agg), by the descriptor's order
    PUT /quire-kv          x-quire-descriptor   chunks of a prefix, out of the client's memory

A POST has the descriptor in its body: for those that are too long for a header. KV requests name their namespace in
x-quire-namespace (JSON, base64url). x-quire-urgency says when layers are needed: `compute-window-us=800,
first-layer-us=2000, priority=1`, each of them optional. The answer has x-amz-rdma-reply (200, 206 for a part, 501 to
decline), x-amz-rdma-bytes-transferred, and, of a GET with a descriptor, a line of JSON for every layer of every node as
it has arrived, the last one a summary. After an answer of 500 or 503 nodes may still be at the client's memory.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
from dataclasses import replace
from typing import Final, Protocol

from aiohttp import web

from quire.model.descriptor import DeliveryOrder, Descriptor, RdmaTarget
from quire.model.durability import Durability, OnExisting
from quire.model.errors import ChunkMissing, DescriptorInvalid, InvalidRequest, QuireError, TargetInvalid
from quire.model.hashing import Namespace, tenant_name
from quire.model.keys import ChunkKeys
from quire.model.outcome import FetchSummary, NodeOutcome
from quire.model.urgency import Urgency
from quire_gateway.access.addresses import WorkerAddresses
from quire_gateway.access.admission import Admission, Need
from quire_gateway.access.key_derivation import KeyDerivation
from quire_gateway.core.limits import Taken
from quire_gateway.core.ranges import check_read, read_range
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.core.sigv4 import UNSIGNED
from quire_gateway.kv.leases import Leases
from quire_gateway.kv.single_chunk import SingleChunkReads
from quire_gateway.kv.transfers import FetchCall, KvTransfers, StoreCall
from quire_gateway.ports import LayerArrived
from quire_gateway.s3.backends import Backends
from quire_gateway.s3.body import Body
from quire_gateway.s3.call import Call
from quire_gateway.s3.checksums import BodyChecks
from quire_gateway.s3.chunk_names import ChunkName
from quire_gateway.s3.declared import Described
from quire_gateway.s3.objects import check_tags, expected_etag, find, version_header
from quire_server.limits.turns import FairTurns
from quire_server.lookups import LookupAnswer
from quire_server.redis.keys.access import CHUNKS_BUCKET, AccessLevel

TOKEN: Final = "x-amz-rdma-token"
DESCRIPTOR: Final = "x-quire-descriptor"
NAMESPACE: Final = "x-quire-namespace"
DELIVERY: Final = "x-quire-delivery"
URGENCY: Final = "x-quire-urgency"
_URGENCY_PAIR: Final = re.compile("(?P<name>compute-window-us|first-layer-us|priority)=(?P<value>-?[0-9]{1,10})")
_REPLY, _MOVED = "x-amz-rdma-reply", "x-amz-rdma-bytes-transferred"
_STAGED_BYTES_MAX: Final = 256 << 20
_STAGED_AT_ONCE: Final = 4


class Staging(Protocol):
    """This process's end of the data plane."""

    async def push(self, data: bytes | memoryview, target: RdmaTarget) -> None:
        """Write into a client's memory; there when this returns. Raises `TargetInvalid`, `PeerLost`."""

    async def pull(self, target: RdmaTarget, length: int) -> bytes:
        """Read from a client's memory."""


class RdmaRequests:
    """Every method answers one kind of request."""

    def __init__(
        self,
        *,
        backends: Backends,
        gateway: KvTransfers,
        singles: SingleChunkReads,
        leases: Leases,
        staging: Staging,
        admission: Admission,
        derivation: KeyDerivation,
        addresses: WorkerAddresses,
    ) -> None:
        self._backends = backends
        self._gateway = gateway
        self._singles = singles
        self._leases = leases
        self._staging = staging
        self._admission = admission
        self._derivation = derivation
        self._addresses = addresses
        self._staged = FairTurns(_STAGED_AT_ONCE)

    def _admit(
        self, call: Call, payload: int, target: RdmaTarget, namespace: Namespace | None = None
    ) -> contextlib.AbstractContextManager[Taken]:
        """A namespace without a salt is shared by those with a grant on it."""
        self._addresses.check(call.principal, target)
        salt = (namespace.tenant_salt or None) if namespace is not None else None
        return self._admission.admit(call.principal, Need(salt=salt, payload=payload, memory=payload))

    def _check(self, call: Call, namespace: Namespace, level: AccessLevel) -> None:
        """A tenant's own namespaces have its salt, which admission has checked; others need a grant.

        Raises `S3Error` AccessDenied.
        """
        if not namespace.tenant_salt:
            self._backends.backend(call.caller, CHUNKS_BUCKET, f"{namespace.tag.hex()}/", level)
        elif level is not AccessLevel.READ and call.caller.key.read_only:
            raise S3Error("AccessDenied", "Access Denied")

    # ---- one object

    async def get(self, call: Call) -> web.StreamResponse:
        """GetObject into the client's memory."""
        target = RdmaTarget.from_token(call.header(TOKEN))
        namespace = _namespace(call) if call.bucket == CHUNKS_BUCKET and call.header(NAMESPACE) else None
        with self._admit(call, target.length, target, namespace):
            if namespace is not None:
                return await self._get_chunk(call, namespace, target)
            return await self._get_staged(call, target)

    async def _get_staged(self, call: Call, target: RdmaTarget) -> web.StreamResponse:
        backend = self._backends.backend(call.caller, call.bucket, call.key, AccessLevel.READ)
        if "partNumber" in call.query:
            raise S3Error("NotImplemented", "partNumber with a token is not implemented here; a Range is")
        entry = await find(backend, call)
        check_read(call.conditions, entry.etag, entry.modified_s)
        span = read_range(call.header("Range"), entry.size)
        start, end = span or (0, entry.size)
        if end - start > min(target.length, _STAGED_BYTES_MAX):
            raise TargetInvalid(f"{end - start} bytes, the target has {target.length}", field=TOKEN)
        async with self._staged.turn(call.principal.tenant):
            data = b"".join([bytes(piece) async for piece in backend.read(entry, start, end)])
            if data:
                await self._staging.push(data, target)
        headers = {"ETag": f'"{entry.etag}"', _REPLY: "206" if span else "200", _MOVED: str(end - start)}
        return web.Response(status=206 if span else 200, headers=headers | version_header(entry.version_id))

    async def put(self, call: Call) -> web.StreamResponse:
        """PutObject from the client's memory: `x-quire-length` bytes, all of it without that."""
        target = RdmaTarget.from_token(call.header(TOKEN))
        namespace = _namespace(call) if call.bucket == CHUNKS_BUCKET else None
        with self._admit(call, target.length, target, namespace):
            if namespace is None:
                return await self._put_staged(call, target)
            layout = namespace.layout
            order = DeliveryOrder.AUTO
            keys = _chunk_key(call.key, namespace)
            descriptor = Descriptor(keys, layout.num_layers, layout.chunk_tokens, layout.slice_bytes, order, target)
            return await self._store(call, namespace, descriptor)

    async def _put_staged(self, call: Call, target: RdmaTarget) -> web.StreamResponse:
        length = call.header("x-quire-length") or str(target.length)
        if not (
            length.isascii()
            and length.isdigit()
            and len(length) < 16
            and 0 < int(length) <= min(target.length, _STAGED_BYTES_MAX)
        ):
            raise InvalidRequest(f"{length[:20]!r}; up to {_STAGED_BYTES_MAX}, and what the token has", field=TOKEN)
        backend = self._backends.backend(call.caller, call.bucket, call.key, AccessLevel.WRITE)
        described, expected = _metadata(call), ""
        check_tags(backend, described)
        if call.conditions.of_write:
            expected = await expected_etag(backend, call.key, call.conditions)
        async with self._staged.turn(call.principal.tenant):
            data = await self._staging.pull(target, int(length))
            body = Body(_Whole(data), len(data), BodyChecks({}, "", call.http.headers.get("Content-MD5")), None)
            entry = await backend.put(call.key, body, described, expected)
        headers = {"ETag": f'"{entry.etag}"', _REPLY: "200", _MOVED: str(len(data))}
        return web.Response(headers=headers | version_header(entry.version_id))

    async def _get_chunk(self, call: Call, namespace: Namespace, target: RdmaTarget) -> web.StreamResponse:
        """S3RDMA Direct: from the storage node into the client's memory. The chunk is the first of its prefix."""
        self._check(call, namespace, AccessLevel.READ)
        layout = namespace.layout
        descriptor = Descriptor(
            await self._derivation.derive(namespace.tag, _chunk_key(call.key, namespace)),
            layout.num_layers,
            layout.chunk_tokens,
            layout.slice_bytes,
            DeliveryOrder.CHUNKWISE,
            target,
        )
        try:
            summary = await self._singles.read(namespace, descriptor, _delivery_id(call), "the chunk")
        except ChunkMissing as error:
            raise S3Error("NoSuchKey", str(error)) from error
        return web.Response(headers={_REPLY: "200", _MOVED: str(summary.bytes_moved)})

    # ---- many chunks

    async def get_many(self, call: Call) -> web.StreamResponse:
        """Many chunks, layer by layer, into the client's memory: a line of JSON for each layer that has arrived."""
        descriptor, namespace = await _described(call)
        with self._admit(call, descriptor.payload_bytes, descriptor.target, namespace):
            return await self._get_leased(call, descriptor, namespace)

    async def _get_leased(self, call: Call, descriptor: Descriptor, namespace: Namespace) -> web.StreamResponse:
        self._check(call, namespace, AccessLevel.READ)
        keys = await self._derivation.derive(namespace.tag, descriptor.keys)
        descriptor = replace(descriptor, keys=keys)
        async with self._leases.held(namespace, descriptor.keys) as leased:
            fetch = replace(_fetch(call, leased, descriptor), namespace=self._derivation.scope(namespace.tag))
            is_whole = leased.matched_chunks == len(descriptor.keys)
            headers = {_REPLY: "200" if is_whole else "206", "x-quire-matched": str(leased.matched_chunks)}
            headers["Content-Type"] = "application/x-ndjson"
            response = web.StreamResponse(status=200 if is_whole else 206, headers=headers)
            response.enable_chunked_encoding()
            call.streaming = response
            await response.prepare(call.http)
            delivery = self._gateway.fetch(fetch)
            try:
                async with contextlib.aclosing(delivery) as events:  # type: ignore[type-var]
                    async for event in events:
                        await response.write(_line(event))
            except QuireError as error:  # the status has gone out: it is a line of its own
                await response.write(json.dumps({"error": error.code(), "message": str(error)}).encode() + b"\n")
            return response

    async def put_many(self, call: Call) -> web.StreamResponse:
        """Many chunks, layer by layer, from the client's memory."""
        descriptor, namespace = await _described(call)
        with self._admit(call, descriptor.payload_bytes, descriptor.target, namespace):
            return await self._store(call, namespace, descriptor)

    async def _store(self, call: Call, namespace: Namespace, descriptor: Descriptor) -> web.StreamResponse:
        self._check(call, namespace, AccessLevel.WRITE)
        durability = call.header("x-quire-durability") or "local"
        if durability.upper() not in Durability.__members__:
            raise InvalidRequest(f"{durability[:20]!r}; there are {', '.join(Durability.__members__).lower()}",
                                 field="x-quire-durability")  # fmt: skip
        if descriptor != replace(descriptor, first_chunk=0, chunk_count=0, layer_stride=0, chunk_offsets=b""):
            raise DescriptorInvalid("a store takes all chunks, one layer behind the other", field=DESCRIPTOR)
        store = StoreCall(
            namespace=namespace,
            keys=await self._derivation.derive(namespace.tag, descriptor.keys),
            first=0,
            store_id=_delivery_id(call),
            source=descriptor.target,
            durability=Durability[durability.upper()],
            on_existing=OnExisting.SKIP,
            source_complete=True,
            tenant=tenant_name(namespace.tenant_salt) if namespace.tenant_salt else call.caller.key.tenant,
        )
        done = await self._gateway.store_whole(store)
        headers = {_REPLY: "200", _MOVED: str(done.bytes_moved), "x-quire-stored": str(done.stored_chunks)}
        return web.Response(headers=headers)


def _namespace(call: Call) -> Namespace:
    try:
        raw = base64.b64decode(call.header(NAMESPACE), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("not base64url", field=NAMESPACE) from None
    return Namespace.from_json(raw)


async def _described(call: Call) -> tuple[Descriptor, Namespace]:
    """Out of the header, or the body of a POST; and the namespace, whose layout it must have."""
    text = call.header(DESCRIPTOR)
    if call.method == "POST":
        text = (await call.xml()).decode("ascii", "replace")
    if not text:
        raise DescriptorInvalid("there is none", field=DESCRIPTOR)
    descriptor, namespace = Descriptor.from_header(text), _namespace(call)
    layout = namespace.layout
    shape = (descriptor.num_layers, descriptor.chunk_tokens, descriptor.slice_bytes)
    if shape != (layout.num_layers, layout.chunk_tokens, layout.slice_bytes):
        raise DescriptorInvalid(f"L, G, S are {shape}, the namespace says otherwise", field=DESCRIPTOR)
    return descriptor, namespace


def _fetch(call: Call, leased: LookupAnswer, descriptor: Descriptor) -> FetchCall:
    """Return the call that delivers the stored part, layer by layer. Raises `S3Error` if nothing is stored."""
    if leased.lease is None:
        raise S3Error("NoSuchKey", "No chunk of these is stored")
    return FetchCall(
        found=leased,
        delivery_id=_delivery_id(call),
        descriptor=descriptor.among(leased.matched_chunks),
        layers_in_stream=True,
        urgency=_urgency(call.header(URGENCY)),
    )


def _urgency(text: str) -> Urgency:
    """Read `compute-window-us=800, first-layer-us=2000, priority=1`. Raises `InvalidRequest`."""
    values: dict[str, int] = {}
    for pair in filter(None, text.split(",")):
        match = _URGENCY_PAIR.fullmatch(pair.strip())
        name = match["name"].replace("-", "_") if match else ""
        if match is None or name in values:
            raise InvalidRequest(
                f"{pair.strip()[:40]!r}; compute-window-us, first-layer-us and priority, each once, with an integer",
                field=URGENCY,
            )
        values[name] = int(match["value"])
    return Urgency(**values)


class _Whole:
    """Bytes that are here, as a connection's content."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def readany(self) -> bytes:
        data, self._data = self._data, b""
        return data


def _metadata(call: Call) -> Described:
    if call.caller.payload_hash not in (UNSIGNED, "") and call.header("Content-Length") not in ("", "0"):
        raise InvalidRequest("a request with a token has no body", field=TOKEN)
    return call.described()


def _delivery_id(call: Call) -> bytes:
    """The client's, if it listens for UCX messages; else a random one."""
    text = call.header(DELIVERY)
    if not text:
        return os.urandom(16)
    try:
        chosen = bytes.fromhex(text)
    except ValueError:
        chosen = b""
    if len(chosen) != 16:
        raise InvalidRequest("not 32 hexadecimal digits", field=DELIVERY)
    return chosen


def _chunk_key(key: str, namespace: Namespace) -> ChunkKeys:
    name = ChunkName.parse(key)
    if name is None or name.namespace != namespace.tag:
        raise S3Error("NoSuchKey", f"A chunk of this namespace is {namespace.tag.hex()}/ and 64 hexadecimal digits")
    return ChunkKeys(name.key)


def _line(event: LayerArrived | NodeOutcome | FetchSummary) -> bytes:
    match event:
        case LayerArrived(node_id, layer):
            record: dict[str, object] = {"layer": layer, "node": node_id}
        case NodeOutcome():
            record = {"node": event.node_id, "quiesced": event.quiesced, "error": event.error_code}
        case FetchSummary(usable, moved_bytes, _, delivered):
            record = {"delivered": sum(delivered), "usable": usable, "bytes": moved_bytes}
    return json.dumps(record).encode() + b"\n"
