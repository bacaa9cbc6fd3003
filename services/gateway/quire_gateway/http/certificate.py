"""The certificate of the HTTP and S3 frontends, reloaded when its files change."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Final

from quire.model.errors import ConfigInvalid
from quire_server import tasks

_LOOK_S: Final = 1.0


class PublicCertificate:
    """TLS context of `cert` and its chain, and `key`, in PEM. Raises `ConfigInvalid`."""

    def __init__(self, cert: str, key: str) -> None:
        self._files = (Path(cert), Path(key))
        self._task: asyncio.Task[None] | None = None
        try:
            self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            raise ConfigInvalid(f"QUIRE_GATEWAY_TLS_CERT, QUIRE_GATEWAY_TLS_KEY: {error}") from None

    def start(self) -> None:
        """Look at the files from now on."""
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        await tasks.end([self._task])

    async def _watch(self) -> None:
        stamp = self._stamp()
        while True:
            await asyncio.sleep(_LOOK_S)
            if (current := self._stamp()) != stamp:
                with contextlib.suppress(OSError, ssl.SSLError):  # half of a rotation: the old one serves on
                    self.context.load_cert_chain(*self._files)
                    stamp = current

    def _stamp(self) -> tuple[int, ...]:
        """Changes when a file is replaced."""
        try:
            return tuple(file.stat().st_mtime_ns for file in self._files)
        except OSError:
            return ()
