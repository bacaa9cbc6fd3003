"""Contents of a request that vLLM's block hashes name by a client's word: adapters, and images, audio and video.

vLLM hashes an adapter's name and path, and of an image the identifier that the client may have chosen. Weights are
trained again under a path, identifiers are used again; Quire outlives an engine and is shared, so that it needs names
that change with the bytes.
"""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import blake3
import torch

from quire.integrations.weights import adapter_digest, adapter_files
from quire.model.keys import KEYS_MAX

_Signature = tuple[tuple[str, int, int, int], ...]


class Unnamed(Exception):
    """Contents without a name of their own. Their request is neither looked up nor stored."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Names of a request's contents apart from its tokens.

    Args:
        adapter: Digest of the adapter's files; empty without an adapter.
        media: First token and chained digest of each image, in the order of the prompt, up to the first without a name.
    """

    adapter: str = ""
    media: tuple[tuple[int, bytes], ...] = ()

    def blocks_max(self, request: Any, block_tokens: int) -> int:
        """Return the number of the request's blocks, from its start, that have names."""
        features = request.mm_features or ()
        if len(features) <= len(self.media):
            return KEYS_MAX
        return int(features[len(self.media)].mm_position.offset) // block_tokens

    def fold(self, hashes: Sequence[bytes], first: int, block_tokens: int) -> list[bytes]:
        """Put the images of a block, and of those before it, into its hash. `first`: the number of the first block."""
        if not self.media:
            return list(hashes)
        starts = [start for start, _ in self.media]
        folded = []
        for number, block_hash in enumerate(hashes, first):
            images = bisect_left(starts, (number + 1) * block_tokens)
            digest = self.media[images - 1][1] if images else b""
            folded.append(hashlib.sha256(block_hash + digest).digest() if digest else block_hash)
        return folded


class ContentNames:
    """Names contents for one engine. Safe from any thread.

    Args:
        media_max: How many images vLLM may hold under their identifiers, in whatever cache.
        media_readable: Whether the scheduler's process has the images' processed data.
    """

    def __init__(self, *, media_max: int, media_readable: bool) -> None:
        self._since_ns = time.time_ns()
        self._media_max = media_max
        self._media_readable = media_readable
        self._adapters: dict[int, tuple[Path, _Signature, str]] = {}
        self._media: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, request: Any) -> Contents:
        """Digest the contents of a request. Raises `Unnamed`."""
        adapter = self._adapter(request.lora_request) if request.lora_request else ""
        return Contents(adapter, self._media_of(request))

    def is_current(self, request: Any) -> bool:
        """Return whether the engine still computes with the adapter that was named."""
        lora = request.lora_request
        if lora is None:
            return True
        with self._lock:
            named = self._adapters.get(lora.lora_int_id)
        return named is not None and named[:2] == (Path(lora.lora_path), _signature(named[0]))

    def _adapter(self, lora: Any) -> str:
        """Name an adapter whose files are older than the engine.

        A worker loads an adapter at any time after its start, and again after an eviction. Files that changed in the
        meantime leave open which of their contents the worker has.
        """
        folder = Path(lora.lora_path)
        if lora.load_inplace or not folder.is_absolute() or not folder.is_dir():
            raise Unnamed(f"adapter {lora.lora_name}: only adapters in local folders have names, by an absolute path")
        signature = _signature(folder)
        if not signature or max(changed_ns for *_, changed_ns in signature) > self._since_ns:
            raise Unnamed(f"adapter {lora.lora_name}: its files changed after the engine's start")
        with self._lock:
            named = self._adapters.get(lora.lora_int_id)
        if named is None:
            named = (folder, signature, adapter_digest(folder))
            with self._lock:
                named = self._adapters.setdefault(lora.lora_int_id, named)
        if named[:2] != (folder, _signature(folder)):
            raise Unnamed(f"adapter {lora.lora_name}: its number was another's, or its files have changed")
        return named[2]

    def _media_of(self, request: Any) -> tuple[tuple[int, bytes], ...]:
        """Digest images by the processed data that the model reads.

        A client may use an identifier again for another image, and vLLM may then compute with either: from such an
        image on a prompt has no name.
        """
        starts, digests = [], []
        for feature in request.mm_features or ():
            digest = _digest_of(feature.data) if self._media_readable else None
            if digest is None or not self._is_first_use(feature.identifier, digest):
                break
            starts.append(int(feature.mm_position.offset))
            digests.append(digest)
        chained = accumulate(digests, lambda chain, digest: hashlib.sha256(chain + digest).digest())
        return tuple(zip(starts, chained, strict=True))

    def _is_first_use(self, identifier: str, digest: bytes) -> bool:
        """Return whether no other image that vLLM may hold has the identifier."""
        with self._lock:
            named = self._media.setdefault(identifier, digest)
            self._media.move_to_end(identifier)
            while len(self._media) > self._media_max:
                self._media.popitem(last=False)
        return named == digest


def _signature(folder: Path) -> _Signature:
    """Describe an adapter's files by their metadata: each write changes the time of change."""
    try:
        states = [(path.name, path.stat()) for path in adapter_files(folder)]
    except FileNotFoundError:
        return ()
    return tuple((name, state.st_ino, state.st_size, state.st_ctime_ns) for name, state in states)


def _digest_of(item: Any) -> bytes | None:
    """Digest processed data, a mapping of names to tensors; None for data in another process."""
    if item is None:
        return None
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for name in sorted(item):
        element = item[name]
        hasher.update(f"{name}/{type(element.field).__name__}".encode())
        if not _add(hasher, element.data):
            return None
    return bytes(hasher.digest())


def _add(hasher: Any, data: Any) -> bool:
    """Add nested tensors and numbers to a digest. Returns False for objects of other types."""
    if isinstance(data, torch.Tensor):
        hasher.update(f"{data.dtype}{tuple(data.shape)}".encode())
        hasher.update(data.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return True
    if isinstance(data, list | tuple):
        hasher.update(f"{type(data).__name__}{len(data)}".encode())
        return all(_add(hasher, part) for part in data)
    if isinstance(data, int | float | str):
        hasher.update(repr(data).encode())
        return True
    return False
