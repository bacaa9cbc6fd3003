"""Blocks in an engine's own memory, as its KV events tell (vLLM, SGLang; MessagePack over ZMQ)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import numpy as np

from quire.model.errors import ConfigInvalid
from quire.telemetry import logger

_POSITIONS: Final = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_REMOVED_POSITIONS: Final = ("type", "block_hashes", "medium")
_OWN_MEDIA: Final = (None, "GPU")
_WHOLE_PREFIX: Final = (None, "full_attention", "mla_attention")
_DIGEST_BYTES: Final = 16
_SEQUENCE_BYTES: Final = 8
Hash = int | bytes


class KnownBlocks:
    """The blocks of one engine, by digests of the tokens up to their ends, whatever hashes the engine has.

    Lost events cost knowledge, never wrong knowledge: then all blocks are forgotten.
    """

    def __init__(self) -> None:
        self.block_tokens = 0
        """Tokens of a block; 0 before the first event."""
        self._digests: dict[tuple[int, Hash], bytes] = {}
        self._copies: dict[bytes, int] = {}
        self._next_sequence = 0

    def __len__(self) -> int:
        return len(self._copies)

    def clear(self) -> None:
        """Forget all blocks."""
        self._digests.clear()
        self._copies.clear()

    def receive(self, sequence: int, batch: Any) -> None:
        """Apply a message of the engine.

        Args:
            sequence: Its number; the engine counts from 0 when it starts.
            batch: (time, events, …), decoded.
        """
        if sequence != self._next_sequence:
            self.clear()
        self._next_sequence = sequence + 1
        try:
            for event in batch[1]:
                self.apply(_fields(event))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            self.clear()
            logger().warning("KV events are not understood", error=repr(error))

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply one event."""
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.clear()
        elif event.get("medium") not in _OWN_MEDIA:
            return
        elif kind == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                self._remove((event.get("group_idx") or 0, block_hash))
        elif kind == "BlockStored" and event.get("kv_cache_spec_kind") in _WHOLE_PREFIX:
            self._store(event)

    def cached_tokens(self, digests: Callable[[int], Iterator[bytes]]) -> int:
        """Return how many tokens from the start of a prompt the engine has in whole blocks.

        Args:
            digests: Returns the digests of the prompt's blocks for a number of tokens of a block.
        """
        size = self.block_tokens
        if not size or not self._copies:
            return 0
        return size * sum(1 for _ in takewhile(self._copies.__contains__, digests(size)))

    def _store(self, event: Mapping[str, Any]) -> None:
        """Add the blocks of a prompt's beginning, and those behind a known block."""
        group, above, size = event.get("group_idx") or 0, event.get("parent_block_hash"), event["block_size"]
        parent = b"" if above is None else self._digests.get((group, above))
        hashes, extras = event["block_hashes"], event.get("extra_keys")
        words = np.asarray(event["token_ids"], dtype="<u4").tobytes()
        if parent is None or not words:
            return
        if len(words) != len(hashes) * size * 4 or size < 1:
            raise ValueError(f"{len(words) // 4} tokens in {len(hashes)} blocks of {size}")
        self.block_tokens = size
        for number, block_hash in enumerate(hashes):
            extra = tuple(extras[number] or ()) if extras else _extra_of(event.get("lora_name") or "", "")
            parent = _digest(parent, words[number * size * 4 : (number + 1) * size * 4], extra)
            self._remove((group, block_hash))
            self._digests[group, block_hash] = parent
            self._copies[parent] = self._copies.get(parent, 0) + 1

    def _remove(self, block: tuple[int, Hash]) -> None:
        digest = self._digests.pop(block, None)
        if digest is None:
            return
        self._copies[digest] -= 1
        if not self._copies[digest]:
            del self._copies[digest]


def digests_of(tokens: Sequence[int], size: int, adapter: str = "", cache_salt: str = "") -> Iterator[bytes]:
    """Return the digests of a prompt's whole blocks of `size` tokens, as they are asked for."""
    words, parent = np.asarray(tokens[: len(tokens) // size * size], dtype="<u4").tobytes(), b""
    for number in range(len(tokens) // size):
        extra = _extra_of(adapter, cache_salt if number == 0 else "")
        parent = _digest(parent, words[number * size * 4 : (number + 1) * size * 4], extra)
        yield parent


class EventSource:
    """The KV events of an engine.

    Args:
        address: ZMQ address that the engine publishes at, for example tcp://10.0.0.7:5557.
        blocks: The blocks that they are applied to.

    Raises:
        ConfigInvalid: pyzmq or msgspec is not installed, or the address is invalid.
    """

    def __init__(self, address: str, blocks: KnownBlocks) -> None:
        try:
            import msgspec
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise ConfigInvalid(f"{error}: the extra `events` of Quire brings it", field="events") from None
        self._blocks = blocks
        self._decode = msgspec.msgpack.Decoder().decode
        self._malformed = msgspec.MsgspecError
        self._socket: Any = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigInvalid(f"{address}: {error}", field="events") from None

    async def run(self) -> None:
        """Receive events until cancelled."""
        try:
            while True:
                frames: Sequence[bytes] = await self._socket.recv_multipart()
                try:
                    batch = self._decode(frames[-1])
                except self._malformed as error:
                    logger().warning("KV events are not understood", error=repr(error))
                    batch = None  # lost
                self._blocks.receive(int.from_bytes(frames[-2:][0][:_SEQUENCE_BYTES], "big"), batch)
        finally:
            self._socket.close(linger=0)


def _fields(event: Any) -> Mapping[str, Any]:
    """Return an event by names: newer engines send maps, older ones arrays."""
    if isinstance(event, Mapping):
        return event
    names = _REMOVED_POSITIONS if event[0] == "BlockRemoved" else _POSITIONS
    return dict(zip(names, event, strict=False))


def _extra_of(adapter: str, cache_salt: str) -> tuple[str, ...]:
    """Return the parts of a block's name besides its tokens."""
    return tuple(value for value in (adapter, cache_salt) if value)


def _digest(parent: bytes, words: bytes, extra: Sequence[Any]) -> bytes:
    about = repr(list(extra)).encode() if extra else b""
    return hashlib.blake2b(parent + words + about, digest_size=_DIGEST_BYTES).digest()
