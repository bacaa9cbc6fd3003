"""Encoding, in two lanes: small images in threads, large ones in processes that end when they are wanted no more.

In each lane tenants take turns. The processes have the lower priority, so that a small image waits for no large one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from quire.model.errors import ResourceExhausted
from quire.model.images import Rendering
from quire_decoder.config import DecoderConfig
from quire_decoder.ports import EncoderProcess, PixelEncoder, Pixels
from quire_server.limits.turns import FairTurns


class Encoders:
    """`encoder` is used in threads here; `make_process`: a process with one of its own."""

    def __init__(
        self, config: DecoderConfig, encoder: PixelEncoder, make_process: Callable[[], EncoderProcess]
    ) -> None:
        self._short_pixels = config.encode_short_pixels
        self._encoder = encoder
        self._make_process = make_process
        self._short = FairTurns(config.threads)
        self._long = FairTurns(config.encode_processes)
        self._threads = ThreadPoolExecutor(config.threads, "encoder")
        self._waiting = ThreadPoolExecutor(2 * config.encode_processes, "encoding process")
        self._processes: set[EncoderProcess] = set()
        self._idle: list[EncoderProcess] = []

    @property
    def waiting(self) -> int:
        """Images that wait for a turn."""
        return self._short.waiting + self._long.waiting

    async def encode(self, source: Pixels | bytes, rendering: Rendering, pixels: int, tenant: str) -> bytes:
        """Pixels, or a lossless file of them, as a file. `pixels`: the most that there are while it is made.

        Cancelling ends it: a large one at once, a small one when its thread is done.
        Raises what `PixelEncoder` raises, `ResourceExhausted` and `DeadlineExceeded`.
        """
        if pixels <= self._short_pixels:
            async with self._short.turn(tenant):
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._encode_here, source, rendering
                )
        async with self._long.turn(tenant):
            return await self._encode_apart(source, rendering)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for pool in (self._threads, self._waiting):
            pool.shutdown(wait=False, cancel_futures=True)

    def _encode_here(self, source: Pixels | bytes, rendering: Rendering) -> bytes:
        pixels = self._encoder.decode_lossless(source) if isinstance(source, bytes) else source
        return self._encoder.encode(pixels, rendering)

    async def _encode_apart(self, source: Pixels | bytes, rendering: Rendering) -> bytes:
        process = self._idle.pop() if self._idle else self._make_process()
        self._processes.add(process)
        running = asyncio.get_running_loop().run_in_executor(self._waiting, process.run, source, rendering)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            process.kill()
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            if running.cancelled():
                raise ResourceExhausted("the decoder stops") from None  # before a thread had taken it
            raise
        finally:
            if process.usable:
                self._idle.append(process)
            else:
                self._processes.discard(process)
