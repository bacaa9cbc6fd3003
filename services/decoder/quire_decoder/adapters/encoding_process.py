"""Encoding in a process of its own: it can be ended in the middle of an image, and its memory and time are bounded.

Pixels and files travel in memfds over a socket pair; the process ends with it. As a program this is that process.
"""

from __future__ import annotations

import array
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from quire.model.errors import DeadlineExceeded, InvalidRequest, QuireError, ResourceExhausted, by_code
from quire.model.images import Rendering
from quire_decoder.adapters.encoding import ImagecodecsEncoder
from quire_decoder.ports import Pixels

_MESSAGE_BYTES: Final = 1 << 16
_NICE: Final = 10
_PR_SET_PDEATHSIG: Final = 1


class EncodingProcess:
    """Process that encodes one image at a time; started with the first.

    `kill`, from any thread, ends it, also in the middle of one.

    `memory_bytes`: memory of encoding beyond that of the process at its start; `timeout_s`: for one image.
    """

    def __init__(self, memory_bytes: int, timeout_s: float) -> None:
        self._memory_bytes = memory_bytes
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._killed = False

    @property
    def usable(self) -> bool:
        """Whether it takes another image."""
        return not self._killed

    def run(self, source: Pixels | bytes, rendering: Rendering) -> bytes:
        """Encode pixels, or a lossless file of them. Blocks.

        Raises what `PixelEncoder` raises; `InvalidRequest` and `DeadlineExceeded` where the bounds do not suffice, and
        `ResourceExhausted` once it was killed.
        """
        shape = [] if isinstance(source, bytes) else list(source.shape)
        data = source if isinstance(source, bytes) else source.tobytes()
        about, sock = {"rendering": _packed(rendering), "shape": shape}, self._started()
        try:
            with _Memory(data) as memory:
                socket.send_fds(sock, [json.dumps(about).encode()], [memory.fd])
            raw, (fd, *_), *_ = socket.recv_fds(sock, _MESSAGE_BYTES, 1) if self.usable else (b"", (-1,))
        except (OSError, ValueError):  # it has ended, and what it sent has no memory with it
            raw, fd = b"", -1
        if not raw:
            raise self._ended()
        answer: dict[str, Any] = json.loads(raw)
        try:
            if "error" in answer:
                raise by_code(answer["error"])(answer["message"], field=answer["field"])
            with mmap.mmap(fd, answer["length"], prot=mmap.PROT_READ) as view:
                return view[:]
        finally:
            os.close(fd)

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            if self._socket is not None:
                self._socket.close()

    def _started(self) -> socket.socket:
        with self._lock:
            if self._killed:
                raise ResourceExhausted("the encoder was ended")
            if self._socket is None:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
                    bounds = [str(self._memory_bytes), str(self._timeout_s)]
                    self._process = subprocess.Popen(command + bounds, pass_fds=[theirs.fileno()])
            return self._socket

    def _ended(self) -> QuireError:
        """Why there was no answer."""
        process, was_killed = self._process, self._killed
        self.kill()
        if was_killed or process is None:
            return ResourceExhausted("the encoder was ended")
        if process.returncode == -signal.SIGALRM:
            return DeadlineExceeded(f"encoding takes more than QUIRE_DECODER_ENCODE_TIMEOUT_S ({self._timeout_s:g} s)")
        return _too_large(self._memory_bytes)


class _Memory:
    """A memfd with a copy of `data`."""

    def __init__(self, data: bytes) -> None:
        self.fd = os.memfd_create("quire-image", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, max(1, len(data)))
        with mmap.mmap(self.fd, max(1, len(data))) as view:
            view[: len(data)] = data

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)


def _packed(rendering: Rendering) -> dict[str, Any]:
    fit, gravity = rendering.fit.value, rendering.gravity.value
    sizes = {"width": rendering.width, "height": rendering.height, "enlarge": rendering.enlarge}
    return {"format": rendering.format, "quality": rendering.quality, "fit": fit, "gravity": gravity} | sizes


def _unpacked(packed: dict[str, Any]) -> Rendering:
    from quire.model.fitting import Fit, Gravity

    return Rendering(**packed | {"fit": Fit(packed["fit"]), "gravity": Gravity(packed["gravity"])})


def _too_large(memory_bytes: int) -> InvalidRequest:
    bound = f"QUIRE_DECODER_ENCODE_BYTES ({memory_bytes >> 20} MiB)"
    return InvalidRequest(f"encoding takes more than {bound}; ask for fewer pixels", field="width, height")


# ---- the process


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with the decoder, also where that is killed
    sock = socket.socket(fileno=int(sys.argv[1]))
    memory_bytes, timeout_s = int(sys.argv[2]), float(sys.argv[3])
    os.nice(_NICE)  # small images come first
    encoder = ImagecodecsEncoder()
    for name in ("png", "jpeg", "webp", "avif"):  # what is loaded counts for the process, not for its first image
        encoder.encode(np.zeros((8, 8, 3), np.uint8), Rendering(name, width=4))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    while True:
        raw, fds, *_ = socket.recv_fds(sock, _MESSAGE_BYTES, 1)
        if not raw:
            return
        about, fd = json.loads(raw), array.array("i", fds)[0]
        size = os.fstat(fd).st_size
        resource.setrlimit(resource.RLIMIT_AS, (taken + size + memory_bytes, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            with _Memory(_encode(encoder, fd, size, about)) as memory:
                length = os.fstat(memory.fd).st_size
                socket.send_fds(sock, [json.dumps({"length": length}).encode()], [memory.fd])
        except (QuireError, MemoryError) as error:
            failure = error if isinstance(error, QuireError) else _too_large(memory_bytes)
            failure_fields = {"error": failure.code(), "message": failure.message[:2000], "field": failure.field}
            socket.send_fds(sock, [json.dumps(failure_fields).encode()], [fd])
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.close(fd)


def _encode(encoder: ImagecodecsEncoder, fd: int, size: int, about: dict[str, Any]) -> bytes:
    with mmap.mmap(fd, size) as view:
        if about["shape"]:
            pixels = np.frombuffer(view, dtype=np.uint8).reshape(about["shape"]).copy()
        else:
            pixels = encoder.decode_lossless(view[:])
    return encoder.encode(pixels, _unpacked(about["rendering"]))


if __name__ == "__main__":
    main()
