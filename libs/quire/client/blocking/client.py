"""The client without asyncio: a loop in a thread, the same methods."""

from __future__ import annotations

from typing import Any, Final

from quire.client.blocking.cache import KvCache
from quire.client.blocking.calls import SyncCalls
from quire.client.blocking.images import Images
from quire.client.client import AsyncClient
from quire.client.images import ImageClient
from quire.client.memory.buffers import Buffer
from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace
from quire.model.layout import KvLayout
from quire.transport import Transport
from quire.wire.tls import Tls

_CLOSE_S: Final = 30.0


class Client(SyncCalls):
    """`with Client("host:port") as client`. Methods as in `AsyncClient`, blocking; safe from any thread."""

    def __init__(
        self,
        gateway_address: str,
        *,
        transport: Transport | None = None,
        timeout_s: float = 60.0,
        zone: str = "",
        tls: Tls | None = None,
        token: str = "",
    ) -> None:
        client = AsyncClient(gateway_address, transport=transport, timeout_s=timeout_s, zone=zone, tls=tls, token=token)
        super().__init__(client, timeout_s)
        self._images = Images(self, ImageClient(client))

    def __enter__(self) -> Client:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Open the data plane. Raises `ConfigInvalid` without UCX, `InvalidRequest` for a client that was closed."""
        if self._thread.ident is not None:
            raise InvalidRequest("it was started before; make another one", field="client")
        self._thread.start()
        try:
            self.run(self._client.start())
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """Stop every transfer, wait until every storage node has stopped writing here, disconnect.

        Safe to call twice.
        """
        if self._loop.is_closed() or self._thread.ident is None:
            return
        try:
            self.run(self._client.close(), _CLOSE_S)
        finally:
            self._stop()

    @property
    def images(self) -> Images:
        """Images: latents in, encoded images out."""
        return self._images

    @property
    def asynchronous(self) -> AsyncClient:
        """The client whose methods `spawn` and `run` take."""
        return self._client

    def allocate(self, length: int) -> Buffer:
        """Registered host memory of `length` bytes. Close it with `free`."""
        return self.on_loop(lambda: self._client.allocate(length))

    def cache(self, model: str, weights: str, layout: KvLayout, *, tenant_salt: bytes = b"") -> KvCache:
        """Return the state of one model by tokens, with `put` and `get`.

        Args:
            model: Its name.
            weights: What the weights are, for example a digest: other weights share nothing with these.
            layout: Shape of its chunks.
            tenant_salt: Keeps the caller's state apart from that of others; the key of a tenant has one.

        Raises:
            InvalidRequest: A name that is empty or too long.
        """
        return KvCache(self, Namespace(model, weights, layout, tenant_salt))

    def register(self, memory: Any) -> Buffer:
        """Register a numpy array or a torch tensor in place; on a GPU where UCX can reach it."""
        return self.on_loop(lambda: self._client.register(memory))

    def let_go(self, buffer: Buffer) -> None:
        """Close a buffer now, or as soon as the last storage node has stopped writing to it."""
        self.on_loop(buffer.let_go)

    def free(self, buffer: Buffer) -> None:
        """Close a buffer. Raises `TargetInvalid` while a storage node may still write to it."""
        self.on_loop(buffer.close)
