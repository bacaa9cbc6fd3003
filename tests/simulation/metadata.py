"""Redis of a simulated cluster: a real redis-server runs the real scripts, on the simulation's time and at its delays.

Each call of a client is a round trip of its own, so that calls of different operations interleave. The simulation
replaces Redis' clock, key expiry (expired keys stay) and messages to subscribers.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import hiredis
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError

from quire.model.fingerprints import PRINT_BYTES
from quire.testing.buckets import MemoryBuckets
from quire.testing.simulation.loop import SimulatedLoop
from quire_server.redis import PrefixIndex
from quire_server.redis.prefix_index.slots import LINKS, PAGES, tagged
from quire_server.redis.scripts import names, part, script
from quire_tools.local.embedded_redis import redis_command

EPOCH_MS: Final = 1_700_000_000_000
_PUBLISHED: Final = "simulated:published"
_START_S: Final = 30.0
_PDEATHSIG: Final = 1
_ON_VIRTUAL_TIME: Final = f"""
local simulated_ms = tonumber(table.remove(ARGV))
local real_redis = redis
local redis = {{call = function(command, ...)
  if command == 'TIME' then
    return {{string.format('%.0f', math.floor(simulated_ms / 1000)), string.format('%.0f', simulated_ms % 1000 * 1000)}}
  end
  if command == 'PEXPIRE' then return 1 end
  if command == 'PTTL' then return 4294967296 end
  if command == 'PUBLISH' then return real_redis.call('RPUSH', '{_PUBLISHED}', ...) end
  return real_redis.call(command, ...)
end}}
"""
# KEYS: pages of buckets. Returns for each chunk: fingerprint, generation, holders, whether an indexed chunk extends it.
_ENTRIES: Final = """
local found = {}
for _, key in ipairs(KEYS) do
  local page = redis.call('GET', key)
  for row = 1, count_of(page) do
    each_run(page, row, row, function(_, placement, generation)
      local extended = is_extended(page, row) and 1 or 0
      found[#found + 1] = {sub(page, 8 * row - 5, 8 * row + 2), generation, placement, extended}
    end)
  end
end
return found
"""
# In the order in which they were made, whatever the seed of the server's hashes.
_ORDERED: Final = {
    "hash-max-ziplist-entries": 1 << 20,
    "hash-max-ziplist-value": 1 << 20,
    "zset-max-ziplist-entries": 1 << 20,
    "zset-max-ziplist-value": 1 << 20,
}


@dataclass(frozen=True, slots=True)
class Listed:
    """A chunk's entry as Redis has it. `extended`: an indexed chunk extends it."""

    generation: int
    nodes: tuple[str, ...]
    extended: bool


class _Client(redis.Redis):
    """Sends each command over one socket: a third of the time that redis-py's pool, retries and metrics take."""

    def __init__(self, path: str) -> None:
        super().__init__(unix_socket_path=path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._reader = hiredis.Reader()
        self.send("HELLO", 3)

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        answer = self.send(*arguments[0].split(), *arguments[1:])
        callbacks: Any = self.response_callbacks
        callback = callbacks.get(arguments[0])
        return callback(answer, **options) if callback else answer

    def send(self, *arguments: Any) -> Any:
        """Return the answer unparsed. Raises `ResponseError`."""
        self._socket.sendall(hiredis.pack_command(arguments))
        while (answer := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(1 << 16))
        if isinstance(answer, hiredis.ReplyError):
            text = str(answer)
            raise (NoScriptError if text.startswith("NOSCRIPT") else redis.ResponseError)(text)
        return answer


class _Server:
    """The redis-server of this process, for one simulated day after the other."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-simulation-")
        path = f"{self._folder.name}/redis"
        command = [*redis_command(Path(self._folder.name), path), "--appendonly", "no"]
        ends_with_parent = ctypes.CDLL(None, use_errno=True).prctl
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, preexec_fn=lambda: ends_with_parent(_PDEATHSIG, signal.SIGKILL)
        )
        started_s = time.monotonic()
        while True:
            try:
                self.client = _Client(path)
                self.client.ping()
                break
            except (OSError, redis.RedisError):
                if self._process.poll() is not None or time.monotonic() - started_s > _START_S:
                    raise
                time.sleep(0.01)
        for name, value in _ORDERED.items():
            self.client.config_set(name, value)
        atexit.register(self.close)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_servers: dict[int, _Server] = {}


def close_server() -> None:
    """Stop the redis-server of this process, if there is one."""
    if server := _servers.pop(os.getpid(), None):
        server.close()


class Metadata:
    """Redis, and the buckets of the S3 frontend. `down`: responses are lost; `executes`: commands still run.

    `executed` is called with the name of each script of the index, its arguments and its answer when it has run; once
    for each bucket that it has changed.
    """

    def __init__(self, loop: SimulatedLoop) -> None:
        self.buckets = MemoryBuckets()
        self.down = False
        self.executes = False
        self.executed: Callable[[str, list[Any], Any], None] = lambda name, arguments, answer: None
        self.loop = loop
        if os.getpid() not in _servers:
            _servers[os.getpid()] = _Server()
        self.server = _servers[os.getpid()].client
        self.server.flushall()
        self.scripts: dict[str, str] = {}
        self._changing: set[str] = set()
        self.subscribers: list[asyncio.Event] = []
        self._names = {script(f"index_{name}"): name for name in names("index")}
        pages = part("index_pages")
        self._entries = self.server.register_script(pages + _ENTRIES)
        self.index = self.new_index()

    def client(self) -> SimRedis:
        """A connection of a process."""
        return SimRedis(self)

    def new_index(self) -> PrefixIndex:
        """The index, as a process knows it."""
        client: Any = self.client()
        return PrefixIndex(client, draw=self.loop.random.randbytes)

    async def wait(self, *, asking: bool = False) -> None:
        """Half a round trip. Raises redis-py's error."""
        await asyncio.sleep(self.loop.random.uniform(50e-6, 300e-6))
        if self.down and not (asking and self.executes):
            await asyncio.sleep(0.05)
            raise RedisConnectionError("Redis does not answer")

    @property
    def now_ms(self) -> int:
        return EPOCH_MS + int(1000 * self.loop.time())

    # ---- scripts

    def register(self, text: str) -> str:
        """Load a script; its name for `EVALSHA`."""
        sha = str(self.server.script_load(_ON_VIRTUAL_TIME + text))
        self.scripts[sha] = self._names.get(text, "PUBLISH" if "PUBLISH" in text else "")
        if part("index_each") in text:
            self._changing.add(sha)
        return sha

    def run(self, sha: str, count: int, *arguments: Any) -> Any:
        """Run a script at once."""
        answer = self.server.send("EVALSHA", sha, count, *arguments, self.now_ms)
        name = self.scripts[sha]
        if name == "PUBLISH":
            self._publish()
        elif name:
            for own, part_answer in self._by_bucket(sha, arguments[count:], answer):
                self.executed(name, own, part_answer)
        return answer

    def _by_bucket(self, sha: str, arguments: Sequence[Any], answer: Any) -> Iterator[tuple[list[Any], Any]]:
        """Yield a script's arguments and answer for each bucket that it changes; of another script all at once."""
        if sha not in self._changing:
            yield list(arguments), answer
            return
        common_count, buckets, *rest = arguments
        common, own = rest[:common_count], rest[common_count:]
        size = len(own) // buckets
        for at, part_answer in enumerate(answer):
            yield [*common, *own[at * size : (at + 1) * size]], part_answer

    def _publish(self) -> None:
        if self.server.delete(_PUBLISHED):
            for subscriber in self.subscribers:
                self.loop.call_later(self.loop.random.uniform(50e-6, 300e-6), subscriber.set)

    # ---- what it has

    def entries(self) -> dict[bytes, Listed]:
        """Read all entries of the index, by fingerprint."""
        pages = sorted(self.server.scan_iter(match=PAGES, count=10_000, _type="string"))
        rows: Any = self._entries(keys=pages)
        return {
            print_: Listed(
                int.from_bytes(generation, "big"), tuple(filter(None, names.decode().split(","))), bool(extended)
            )
            for print_, generation, names, extended in rows
        }

    def dangling(self) -> list[bytes]:
        """Children that links keep their parents for, and that are not indexed; fingerprints."""
        listed = self.entries()
        names = self.server.scan_iter(match=LINKS, count=10_000, _type="hash")
        fields: Any = [field for name in names for field in self.server.hgetall(name)]
        children = [field[PRINT_BYTES : 2 * PRINT_BYTES] for field in fields]
        return [child for child in children if child not in listed]

    def leases(self) -> list[int]:
        """When each lease ends, in ms since the Unix epoch; also of some that have ended."""
        pattern = tagged(b"p", b"*") + b"*"
        return [
            int(expires_ms)
            for name in self.server.scan_iter(match=pattern, count=10_000)
            for field, expires_ms in dict(self.server.hgetall(name)).items()
            if len(field) > PRINT_BYTES
        ]

    def empty(self) -> None:
        """Delete everything."""
        self.server.flushdb()

    def snapshot(self) -> dict[bytes, bytes]:
        """Dump every key, as a backup or a replica has it."""
        names: list[bytes] = sorted(self.server.scan_iter(count=10_000))
        return {name: self.server.dump(name) for name in names}  # type: ignore[misc]

    def restore(self, snapshot: dict[bytes, bytes]) -> None:
        """Replace the content by a snapshot."""
        self.server.flushdb()
        for name, value in snapshot.items():
            self.server.restore(name, 0, value)


class SimRedis:
    """The methods of an asyncio Redis client that `quire_server.redis` uses."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self._scans: dict[int, bytes] = {}

    def register_script(self, text: str) -> _Script:
        return _Script(self, text)

    def pipeline(self, *, transaction: bool) -> _Pipeline:
        assert not transaction
        return _Pipeline(self)

    def pubsub(self) -> _Subscription:
        return _Subscription(self.metadata)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any, **options: Any) -> Any:
            await self.metadata.wait(asking=True)
            answer = self.at_once(name, *arguments, **options)
            await self.metadata.wait()
            return answer

        return call

    def at_once(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Have one command carried out."""
        match name:
            case "execute_command":
                assert arguments[0] == "EVALSHA"
                return self.metadata.run(*arguments[1:])
            case "time":
                return divmod(1000 * self.metadata.now_ms, 1_000_000)
            case "expire":
                return 0
            case "scan":
                return self._scan(*arguments, **options)
            case "hscan":
                return self._hscan(*arguments, **options)
            case _:
                return getattr(self.metadata.server, name)(*arguments, **options)

    def _scan(self, cursor: int, *, match: bytes, count: int, _type: str) -> tuple[int, list[bytes]]:
        """Scan in an order that does not depend on the server's hash seed."""
        names = self.metadata.server.scan_iter(match=match, count=10_000, _type=_type)
        return self._page(sorted(names), cursor, count)

    def _hscan(self, name: bytes, cursor: int, *, count: int) -> tuple[int, dict[bytes, bytes]]:
        fields: Any = self.metadata.server.hgetall(name)
        next_cursor, page = self._page(sorted(fields), cursor, count)
        return next_cursor, {field: fields[field] for field in page}

    def _page(self, names: list[bytes], cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next page and cursor. A name that exists during the whole scan is on one page."""
        last_name = self._scans.get(cursor, b"")
        page = [name for name in names if name > last_name][: max(1, count // 8)]
        if not page or page[-1] == names[-1]:
            return 0, page
        next_cursor = len(self._scans) + 1
        self._scans[next_cursor] = page[-1]
        return next_cursor, page


class _Script:
    """A registered script, called with keys and arguments."""

    def __init__(self, client: SimRedis, text: str) -> None:
        self._client = client
        self.sha = client.metadata.register(text)

    async def __call__(self, *, keys: Sequence[Any], args: Sequence[Any] = ()) -> Any:
        return await self._client.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)


class _Pipeline:
    """Commands that go out together. Those of other clients come in between scripts."""

    def __init__(self, client: SimRedis) -> None:
        self._client = client
        self._commands: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: self._commands.append((name, arguments, options))

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        metadata, commands, self._commands = self._client.metadata, self._commands, []
        await metadata.wait(asking=True)
        if all(name == "execute_command" for name, _, _ in commands):
            answers = []
            for name, arguments, _ in commands:
                if metadata.loop.random.random() < 0.1:
                    await asyncio.sleep(100e-6)
                answers.append(self._client.at_once(name, *arguments))
        else:
            together = metadata.server.pipeline(transaction=False)
            for name, arguments, options in commands:
                getattr(together, name)(*arguments, **options)
            answers = together.execute()
        await metadata.wait()
        return answers


class _Subscription:
    """A subscription to the only channel."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._heard = asyncio.Event()

    async def subscribe(self, channel: str) -> None:
        await self._metadata.wait()
        self._metadata.subscribers.append(self._heard)

    async def get_message(self, *, ignore_subscribe_messages: bool, timeout: float) -> Any:
        try:
            async with asyncio.timeout(timeout):
                await self._heard.wait()
        except TimeoutError:
            return None
        self._heard.clear()
        await self._metadata.wait()
        return {}

    async def aclose(self) -> None:
        if self._heard in self._metadata.subscribers:
            self._metadata.subscribers.remove(self._heard)
