"""S3 clients on a simulated day: overwrites, conditions, multipart uploads, copies and listings, at two gateways.

What they saw of each key has to be explained by some order of their requests; what was acknowledged is readable, bytes
are those that were sent, and blobs that nothing refers to go. The names lie in a Redis that keeps them: a Redis that is
emptied or rolled back loses them, which is not simulated for buckets.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from quire.model import buckets as bucket_rules
from quire.model.errors import QuireError, Unavailable
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3 import backend as backend_module
from quire_gateway.s3 import body as body_module
from quire_gateway.s3.backend import ObjectBackend
from quire_gateway.s3.backends import Backends
from quire_gateway.s3.body import Body
from quire_gateway.s3.checksums import BodyChecks
from quire_gateway.s3.declared import Described
from quire_gateway.s3.listing import list_objects
from tests.simulation.registers import Kind, Operation, Outcome, is_linearizable

if TYPE_CHECKING:
    from tests.simulation.world import Day

_AT: Final = ("tenant-0", "bucket")
_KEYS: Final = ("a", "a/b", "a/c", "d", "e/f")
_PLAIN: Final = Described({}, {})
_DEADLINE_S: Final = 30.0
_NOT_DONE: Final = frozenset({"NoSuchUpload", "InvalidPart", "IncompleteBody", "RequestTimeout", "BadDigest"})


class Lost(Exception):
    """The answer to a request was lost."""


class _Slowly:
    """A body that comes in pieces, with pauses; a small one at once."""

    def __init__(self, data: bytes, rng: random.Random) -> None:
        self._data = data
        self._rng = rng

    async def readany(self) -> bytes:
        if len(self._data) > 50:
            await asyncio.sleep(self._rng.uniform(0, 0.01) if self._rng.random() < 0.99 else 5.0)
        size = self._rng.randrange(1, 900)
        part, self._data = self._data[:size], self._data[size:]
        return part


@dataclass(slots=True)
class BucketLoad:
    """Some clients of one bucket. `seen`: what they saw, by key; `contents`: bytes by ETag."""

    day: Day
    clients: int = 2
    rate: float = 5.0
    seen: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    contents: dict[str, bytes] = field(default_factory=dict)
    serial: int = 0

    def __post_init__(self) -> None:
        # As everything on a simulated day is a thousand times quicker, and parts are small.
        vars(bucket_rules).update(GRACE_MS=3_000, UNCOMMITTED_MS=12_000)
        vars(body_module)["LONGEST_S"] = 4.0
        vars(backend_module).update(BLOB_BYTES=700, PART_BYTES_MIN=1000)

    async def run(self) -> None:
        """Until the day's load ends."""
        await self.day.cluster.metadata.buckets.create(*_AT, 0.0)
        clients = [asyncio.create_task(self._client()) for _ in range(self.clients)]
        try:
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()

    async def _client(self) -> None:
        rng = random.Random(self.day.rng.getrandbits(64))
        tasks: set[asyncio.Task[None]] = set()
        while self.day.loop.time() < self.day.seconds:
            await asyncio.sleep(rng.expovariate(self.rate))
            task = asyncio.create_task(self._operate(rng))
            tasks.add(task)
        await asyncio.gather(*tasks)

    async def _operate(self, rng: random.Random) -> None:
        kind = rng.choice(("put",) * 4 + ("get",) * 5 + ("multipart",) * 2 + ("delete", "list", "copy"))
        key = rng.choice(_KEYS)
        self.day.history.count(f"S3 {kind}")
        method: Callable[[random.Random, str], Awaitable[None]] = getattr(self, f"_{kind}")
        await method(rng, key)

    # ---- requests

    async def _request(self, rng: random.Random, run: Callable[[Backends], Coroutine[Any, Any, Any]]) -> Any:
        """At one of the gateways. Raises what it raises, and `Lost` where the client hears nothing."""
        member = self.day.cluster.members[rng.choice(["s3-0", "s3-1"])]
        process = member.process
        if process.dead or member.service is None:
            raise Unavailable("the connection is refused")
        began_s = self.day.loop.time()
        task = process.start(run(member.service))
        patience_s = rng.uniform(0.0, 0.1) if rng.random() < 0.05 else _DEADLINE_S
        gone = asyncio.create_task(process.died())
        await asyncio.wait([task, gone], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if task.done():
            return task.result()
        if self.day.loop.time() - began_s >= _DEADLINE_S:
            raise self.day.history.fail("an S3 request was not answered within its deadline")
        if not process.dead:
            task.cancel()  # the client has gone
        raise Lost

    async def _commit(
        self,
        rng: random.Random,
        operation: Operation,
        key: str,
        run: Callable[[ObjectBackend], Coroutine[Any, Any, Any]],
    ) -> None:
        """Something that changes a key."""
        done = await self._attempt(rng, operation, key, run)
        if done is not None:
            self.seen[key].append(done)

    async def _attempt(
        self,
        rng: random.Random,
        operation: Operation,
        key: str,
        run: Callable[[ObjectBackend], Coroutine[Any, Any, Any]],
    ) -> Operation | None:
        """What became of it. None if it was certainly not done."""
        outcome: Outcome | None = Outcome.DONE
        began_s = self.day.loop.time()
        try:
            await self._request(rng, lambda backends: run(self._backend(backends)))
        except S3Error as error:
            outcome = Outcome.REFUSED if error.code in ("ConditionalRequestConflict", "PreconditionFailed") else None
            if outcome is None and error.code not in _NOT_DONE:
                raise self.day.history.fail(f"{operation.kind.name} answers {error.code}", key.encode()) from None
        except (Lost, QuireError) as error:
            outcome = None if type(error) is Unavailable else Outcome.UNKNOWN
        self._tell(key, f"{operation.kind.name} {operation.value} if {operation.expected!r}: {outcome}")
        if outcome is None:
            return None
        now_s = self.day.loop.time()
        return replace(operation, began_s=began_s, ended_s=now_s, outcome=outcome)

    def _saw(self, key: str, operation: Operation) -> None:
        self.seen[key].append(replace(operation, ended_s=self.day.loop.time()))

    def _tell(self, key: str, text: str) -> None:
        self.day.tell(f"S3 {key}: {text}", [key.encode()])

    @staticmethod
    def _backend(backends: Backends) -> ObjectBackend:
        return ObjectBackend(*_AT, buckets=backends.buckets, blobs=backends._blobs, clock=backends.clock)

    def _new(self, rng: random.Random) -> bytes:
        self.serial += 1
        return (f"{self.serial} ".encode() * rng.choice([1, 40, 400, 1200]))[: rng.choice([100, 3000, 4000])]

    @staticmethod
    def _body(data: bytes, rng: random.Random) -> Body:
        return Body(_Slowly(data, random.Random(rng.getrandbits(32))), len(data), BodyChecks({}, ""), None)

    def _expected(self, rng: random.Random, key: str) -> str:
        values = [each.value for each in self.seen[key] if each.value]
        return rng.choice(["", "", "", "absent", values[-1] if values else "absent"])

    # ---- kinds

    async def _put(self, rng: random.Random, key: str) -> None:
        data = self._new(rng)
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self.contents[etag] = data
        expected, body = self._expected(rng, key), self._body(data, rng)
        if rng.random() < 0.03:
            body = Body(_Slowly(data[:-1], rng), len(data), BodyChecks({}, ""), None)
        write = Operation(Kind.WRITE, 0.0, 0.0, etag, expected)
        await self._commit(rng, write, key, lambda backend: backend.put(key, body, _PLAIN, expected))

    async def _delete(self, rng: random.Random, key: str) -> None:
        expected = self._expected(rng, key).replace("absent", "")
        operation = Operation(Kind.DELETE, 0.0, 0.0, None, expected)
        await self._commit(rng, operation, key, lambda backend: backend.delete(key, expected))

    async def _get(self, rng: random.Random, key: str) -> None:
        began_s = self.day.loop.time()

        async def read(backends: Backends) -> tuple[str | None, bytes]:
            backend = self._backend(backends)
            entry = await backend.head(key)
            if entry is None:
                return None, b""
            looked_s = self.day.loop.time()
            self._saw(key, Operation(Kind.READ, began_s, looked_s, entry.etag))
            return entry.etag, b"".join([bytes(piece) async for piece in backend.read(entry, 0, entry.size)])

        try:
            etag, data = await self._request(rng, read)
        except (Lost, QuireError):
            return
        self._tell(key, f"read: {etag}")
        if etag is None:
            self._saw(key, Operation(Kind.READ, began_s, 0.0, None))
        elif data != self.contents[etag]:
            raise self.day.history.fail("wrong bytes of an S3 object", key.encode())

    async def _list(self, rng: random.Random, _: str) -> None:
        began_s, limit = self.day.loop.time(), rng.choice([2, 100])
        try:
            listing = await self._request(
                rng, lambda backends: list_objects(self._backend(backends), "", "", "", limit)
            )
        except (Lost, QuireError):
            return
        found = {entry.key: entry.etag for entry in listing.objects}
        self._tell("", f"listed: {found}")
        for key in _KEYS:
            if key in found or not listing.truncated or key < listing.last:
                self._saw(key, Operation(Kind.READ, began_s, 0.0, found.get(key)))

    async def _copy(self, rng: random.Random, key: str) -> None:
        source = rng.choice(_KEYS)
        try:
            entry = await self._request(rng, lambda backends: self._backend(backends).head(source))
        except (Lost, QuireError):
            return
        if entry is None:
            return
        expected = self._expected(rng, key)
        data = self.contents[entry.etag]
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()  # a copy is not made of parts
        self.contents[etag] = data
        write = Operation(Kind.WRITE, 0.0, 0.0, etag, expected)
        await self._commit(rng, write, key, lambda backend: backend.copy(key, entry, backend, _PLAIN, expected, ""))

    async def _multipart(self, rng: random.Random, key: str) -> None:
        try:
            upload_id = await self._request(rng, lambda backends: self._backend(backends).start_upload(key, _PLAIN))
        except (Lost, QuireError):
            return
        parts = {number: self._new(rng) for number in range(1, rng.randrange(2, 5))}
        again = {number: self._new(rng) for number in parts if rng.random() < 0.2}
        tags = {}
        for number, data in [*parts.items(), *again.items()]:
            try:
                part = await self._part(rng, key, upload_id, number, data)
            except (Lost, QuireError):
                continue
            except S3Error as error:
                if error.code not in _NOT_DONE:
                    raise self.day.history.fail(f"a part answers {error.code}", key.encode()) from None
                continue
            tags[number] = part.etag
            self.contents[part.etag] = data
        completing = [self._complete(rng, key, upload_id, tags) for _ in range(rng.choice([1, 1, 2]))]
        if rng.random() < 0.3:
            completing.append(self._complete(rng, key, upload_id, dict(list(tags.items())[:1])))
        others = [self._late_part(rng, key, upload_id) for _ in range(6)] if rng.random() < 0.5 else []
        if rng.random() < 0.3:
            others.append(self._abort(rng, key, upload_id))
        done, _ = await asyncio.gather(asyncio.gather(*completing), asyncio.gather(*others))
        self._completed(key, [each for each in done if each is not None])

    def _completed(self, key: str, done: list[Operation]) -> None:
        """An upload becomes one object, once; an answer to a second request for the same one changes nothing."""
        heard = [each for each in done if each.outcome is Outcome.DONE]
        if len({each.value for each in heard}) > 1:
            raise self.day.history.fail("an upload was completed twice", key.encode())
        if not heard:
            self.seen[key] += done
            return
        self.seen[key] += [each for each in done if each.outcome is Outcome.REFUSED]
        same = [each for each in done if each.value == heard[0].value and each.outcome is not Outcome.REFUSED]
        began_s, ended_s = min(each.began_s for each in same), min(each.ended_s for each in heard)
        expected = {each.expected for each in same}
        once = replace(
            heard[0], began_s=began_s, ended_s=ended_s, expected=expected.pop() if len(expected) == 1 else ""
        )
        self.seen[key].append(once)

    async def _late_part(self, rng: random.Random, key: str, upload_id: str) -> None:
        """The first one once more, while the upload is being completed."""
        with contextlib.suppress(Lost, QuireError, S3Error):
            await self._part(rng, key, upload_id, 1, b"late")

    async def _part(self, rng: random.Random, key: str, upload_id: str, number: int, data: bytes) -> Any:
        body = self._body(data, rng)
        return await self._request(rng, lambda backends: self._backend(backends).put_part(key, upload_id, number, body))

    async def _complete(self, rng: random.Random, key: str, upload_id: str, tags: dict[int, str]) -> Operation | None:
        wanted = sorted(tags.items())
        if not wanted or any(len(self.contents[etag]) < backend_module.PART_BYTES_MIN for _, etag in wanted[:-1]):
            await self._abort(rng, key, upload_id)
            return None
        digest = hashlib.md5(b"".join(bytes.fromhex(etag) for _, etag in wanted), usedforsecurity=False)
        etag = f"{digest.hexdigest()}-{len(wanted)}"
        self.contents[etag] = b"".join(self.contents[each] for _, each in wanted)
        await asyncio.sleep(rng.uniform(0, 0.03))
        expected = self._expected(rng, key)
        write = Operation(Kind.WRITE, 0.0, 0.0, etag, expected)
        return await self._attempt(rng, write, key, lambda backend: backend.complete(key, upload_id, wanted, expected))

    async def _abort(self, rng: random.Random, key: str, upload_id: str) -> None:
        try:
            await self._request(rng, lambda backends: self._backend(backends).abort(key, upload_id))
        except S3Error as error:
            if error.code not in _NOT_DONE:
                raise
        except (Lost, QuireError):
            return

    # ---- the day's end

    async def check(self) -> None:
        """Everything is healed: what was seen fits together, all of it is readable, and no blob is left over."""
        for key in _KEYS:
            await self._get(random.Random(1), key)
            if not is_linearizable(self.seen[key]):
                raise self.day.history.fail("no order of the requests explains what S3 clients saw", key.encode())
        cluster = self.day.cluster
        backends = Backends(
            buckets=cluster.metadata.buckets,
            blobs=cluster.blobs,
            reserved={},
            clock=_Tomorrow(),  # type: ignore[arg-type]
        )
        backend = self._backend(backends)
        for upload in await backend.uploads():
            await backend.abort(upload.key, upload.upload_id)
        await backends.sweep()
        entries = [entry for key in _KEYS if (entry := await backend.head(key)) is not None]
        wanted = {blob.name for entry in entries for blob in entry.blobs}
        for entry in entries:
            try:
                data = b"".join([bytes(piece) async for piece in backend.read(entry, 0, entry.size)])
            except Unavailable:
                data = b""
            if data != self.contents[entry.etag]:
                raise self.day.history.fail("an S3 object lost a blob", entry.key.encode())
        left = set(cluster.blobs.blobs) - wanted
        assert not left, f"{len(left)} blobs are left that nothing refers to"
        assert not cluster.blobs.missed, "an S3 object lost a blob while it was there"


class _Tomorrow:
    """A clock that is far ahead, and further each time."""

    def __init__(self) -> None:
        self._now_ms = 10**15

    def now_ms(self) -> int:
        self._now_ms += 10**9
        return self._now_ms
