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
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import blake3
import torch

from quire.integrations.weights import adapter_digest, adapter_files
from quire.model.keys import KEYS_MAX

_CLOCKS_DIFFER_NS: Final = 1_000_000_000
_DIGESTED_S: Final = 10.0  # within which a request waits for its adapter's name
_Signature = tuple[tuple[str, int, int, int], ...]


class Unnamed(Exception):
    """Contents without a name of their own. Their request is neither looked up nor stored."""


@dataclass(frozen=True, slots=True)
class ModelContents:
    """Names of a request's contents apart from its tokens.

    Args:
        adapter: Digest of the adapter's files; empty without an adapter.
        media: First token and chained digest of each image, in the order of the prompt, up to the first without a name.
        identifiers: Identifier and digest of each of these images.
        features: Number of the request's images, named or not.
    """

    adapter: str = ""
    media: tuple[tuple[int, bytes], ...] = ()
    identifiers: tuple[tuple[str, bytes], ...] = ()
    features: int = 0

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
        since_ns: Time at which the engine started, nanoseconds since the epoch; by default the current time.
    """

    def __init__(self, *, media_max: int, media_readable: bool, since_ns: int | None = None) -> None:
        self._since_ns = time.time_ns() - _CLOCKS_DIFFER_NS if since_ns is None else since_ns
        self._media_max = media_max
        self._media_readable = media_readable
        self._adapters: dict[int, tuple[Path, _Signature, str]] = {}
        self._changed_adapters: set[int] = set()
        # By identifier: a digest, empty for an identifier of several images, or of one that is not known.
        self._media: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, request: Any) -> ModelContents:
        """Digest the contents of a request. Raises `Unnamed`."""
        media = self._media_of(request)  # first: each image counts, whatever becomes of the request
        return ModelContents(self.adapter(request.lora_request) if request.lora_request else "", *media)

    def distrust(self, request: Any, first: int = 0) -> None:
        """Leave the identifiers of a request's images without names, from the image `first` on.

        vLLM computes with these images before their digests are known.
        """
        for feature in (request.mm_features or ())[first:]:
            self._note(feature.identifier, b"")

    def is_current(self, request: Any, contents: ModelContents) -> bool:
        """Return whether the engine still computes with the named contents, and with no others of the same names."""
        self.distrust(request, contents.features)  # images of a request that grew
        with self._lock:
            if any(self._media.get(identifier) != digest for identifier, digest in contents.identifiers):
                return False
        return request.lora_request is None or self.is_adapter_current(request.lora_request)

    def is_adapter_current(self, lora: Any) -> bool:
        """Return whether the engine still computes with the adapter that was named."""
        with self._lock:
            named = self._adapters.get(lora.lora_int_id)
        signature = _signature(Path(lora.lora_path))
        if named is None or lora.lora_int_id in self._changed_adapters:
            return False
        if not signature or named[:2] != (Path(lora.lora_path), signature):
            self._changed_adapters.add(lora.lora_int_id)
            return False
        return True

    def adapter(self, lora: Any) -> str:
        """Name an adapter whose files are older than the engine. Raises `Unnamed`.

        A worker loads an adapter at any time after its start, and again after an eviction. Files that changed in the
        meantime leave open which of their contents the worker has: the adapter's number has no name from then on.
        """
        folder = Path(lora.lora_path)
        try:
            if lora.load_inplace or not folder.is_absolute():
                raise Unnamed(f"adapter {lora.lora_name}: only those in local folders have names, by an absolute path")
            signature = _signature(folder)
            if not signature or max(changed_ns for *_, changed_ns in signature) > self._since_ns:
                raise Unnamed(f"adapter {lora.lora_name}: its files are missing, or changed after the engine's start")
            with self._lock:
                named = self._adapters.get(lora.lora_int_id)
            if named is None:
                named = (folder, signature, adapter_digest(folder))
                with self._lock:
                    named = self._adapters.setdefault(lora.lora_int_id, named)
            if named[:2] != (folder, _signature(folder)):
                raise Unnamed(f"adapter {lora.lora_name}: its number was another's, or its files have changed")
        except (Unnamed, OSError):
            self._changed_adapters.add(lora.lora_int_id)
            raise
        if lora.lora_int_id in self._changed_adapters:
            raise Unnamed(f"adapter {lora.lora_name}: its files have changed")
        return named[2]

    def _media_of(self, request: Any) -> tuple[tuple[tuple[int, bytes], ...], tuple[tuple[str, bytes], ...], int]:
        """Digest images by the processed data that the model reads.

        A client may use an identifier again for another image, and vLLM may then compute with either: from such an
        image on a prompt has no name.

        Returns:
            First token and chained digest of each named image, their identifiers and digests, and the number of all.
        """
        features = list(request.mm_features or ())
        starts, digests, identifiers, is_named = [], [], [], True
        for feature in features:
            digest = (_digest_of(feature.data) if self._media_readable else None) or b""
            is_named = self._note(feature.identifier, digest) and is_named
            if is_named:
                starts.append(int(feature.mm_position.offset))
                digests.append(digest)
                identifiers.append((feature.identifier, digest))
        chained = accumulate(digests, lambda chain, digest: hashlib.sha256(chain + digest).digest())
        return tuple(zip(starts, chained, strict=True)), tuple(identifiers), len(features)

    def _note(self, identifier: str, digest: bytes) -> bool:
        """Record the image of an identifier. Returns whether it is known, and no other image had the identifier."""
        with self._lock:
            if self._media.setdefault(identifier, digest) != digest:
                self._media[identifier] = b""
            self._media.move_to_end(identifier)
            while len(self._media) > self._media_max:
                self._media.popitem(last=False)
            return bool(digest) and self._media.get(identifier) == digest


class RequestAdapter:
    """The adapter of one request of an engine with a `QuireTier`.

    `PARAMETER` is the request's transfer parameter that has it: vLLM gives these to its tiers, and not the adapter.

    Args:
        names: Names of the engine's contents.
        lora: vLLM's description of the adapter.
        naming: Digests the adapter's files.
    """

    PARAMETER: Final = "quire_adapter"

    def __init__(self, names: ContentNames, lora: Any, naming: Future[str]) -> None:
        self._names = names
        self._lora = lora
        self._naming = naming
        self._begun_s = time.monotonic()

    def name(self) -> bytes | None:
        """Return the digest of the adapter's files; None while it is not known.

        Raises:
            Unnamed: The adapter has no name, or none for a long time.
        """
        if not self._naming.done():
            if time.monotonic() - self._begun_s > _DIGESTED_S:
                raise Unnamed(f"adapter {self._lora.lora_name}: reading its files took more than {_DIGESTED_S:g} s")
            return None
        try:
            return bytes.fromhex(self._naming.result())
        except OSError as error:
            raise Unnamed(f"adapter {self._lora.lora_name}: {error}") from error

    def current_name(self) -> bytes | None:
        """Return `name`. Raises `Unnamed` also for an adapter that changed since."""
        name = self.name()
        if name is not None and not self._names.is_adapter_current(self._lora):
            raise Unnamed(f"adapter {self._lora.lora_name}: its files have changed")
        return name


def _signature(folder: Path) -> _Signature:
    """Describe an adapter's files by their metadata: each write changes the time of change.

    The folder, and links on the way to it, are part of the description: another one may be put in its place.
    """
    try:
        links = [path for path in (folder, *folder.parents) if path == folder or path.is_symlink()]
        states = [(str(path), path.lstat()) for path in links]
        files = adapter_files(folder)
        states += [(path.name, path.stat()) for path in files]
    except OSError:
        return ()
    if not files:
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
