"""Hashing of tokens to chained block keys: H_i = Hash(H_{i-1} ‖ tokens_i), H_{-1} = digest of the namespace.

Two hashes: `sha256_cbor`, SHA-256 over canonical CBOR of (parent, tokens, extra) as vLLM's portable choice does it, and
`blake3` over the parent and the tokens as little-endian 32-bit words, six times as fast. The namespace digest names the
algorithm, so that keys of the two never meet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final

import blake3
import cbor2
import numpy as np
import numpy.typing as npt

from quire.model.choices import choice
from quire.model.errors import InvalidRequest, KeysInvalid
from quire.model.keys import KEY_BYTES, KEYS_MAX, ChunkKeys
from quire.model.layout import Attention, Dtype, KvLayout
from quire.model.policy import NAMESPACE_TAG_BYTES

_SALT_BYTES_MAX: Final = 64
_NAME_LENGTH_MAX: Final = 512


class HashAlgorithm(Enum):
    """How block keys are computed."""

    SHA256_CBOR = "sha256_cbor"
    BLAKE3 = "blake3"


@dataclass(frozen=True, slots=True)
class Namespace:
    """The facts under which equal tokens have equal state. Namespaces share nothing.

    `tenant_salt` keeps one tenant from probing another's cache by timing. `shard_index` of `shard_count` is the
    tensor-parallel rank. Raises `InvalidRequest`.
    """

    model_id: str
    weight_version: str
    layout: KvLayout
    tenant_salt: bytes = b""
    adapter: str = ""
    shard_index: int = 0
    shard_count: int = 1

    def __post_init__(self) -> None:
        if not self.model_id:
            raise InvalidRequest("must name the model", field="namespace.model_id")
        for name in ("model_id", "weight_version", "adapter"):
            if len(getattr(self, name)) > _NAME_LENGTH_MAX:
                raise InvalidRequest(f"longer than {_NAME_LENGTH_MAX} characters", field=f"namespace.{name}")
        if len(self.tenant_salt) > _SALT_BYTES_MAX:
            raise InvalidRequest(f"longer than {_SALT_BYTES_MAX} bytes", field="namespace.tenant_salt")
        if not 0 <= self.shard_index < self.shard_count:
            raise InvalidRequest(f"{self.shard_index} of {self.shard_count}", field="namespace.shard_index")

    @property
    def tenant(self) -> str:
        """Name of the tenant, by which links are shared."""
        return tenant_name(self.tenant_salt)

    def to_json(self) -> str:
        """Return a form for files and headers; see `from_json`."""
        return json.dumps(self.to_record(), indent=2)

    def to_record(self) -> dict[str, str | int]:
        """Return a form for JSON; see `from_record`."""
        layout = self.layout
        return {
            "model_id": self.model_id,
            "weight_version": self.weight_version,
            "tenant_salt_hex": self.tenant_salt.hex(),
            "adapter": self.adapter,
            "num_layers": layout.num_layers,
            "chunk_tokens": layout.chunk_tokens,
            "kv_heads": layout.kv_heads,
            "head_dim": layout.head_dim,
            "dtype": layout.dtype.value[0],
            "attention": layout.attention.value,
            "shard_index": self.shard_index,
            "shard_count": self.shard_count,
        }

    @classmethod
    def from_json(cls, text: str | bytes) -> Namespace:
        """The inverse of `to_json`. Raises `InvalidRequest`, with the reason."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"this is no namespace: {error!r}", field="namespace") from None
        return cls.from_record(record)

    @classmethod
    def from_record(cls, record: Any) -> Namespace:
        """The inverse of `to_record`. Raises `InvalidRequest`, with the reason."""
        try:
            numbers = [record[name] for name in ("num_layers", "chunk_tokens", "kv_heads", "head_dim")]
            shard = record.get("shard_index", 0), record.get("shard_count", 1)
            if not all(type(number) is int for number in (*numbers, *shard)):
                raise ValueError(f"{(*numbers, *shard)} are not all whole numbers")
            dtype = next(dtype for dtype in Dtype if dtype.value[0] == record["dtype"])
            layers, tokens, heads, dim = numbers
            layout = KvLayout(layers, tokens, heads, dim, dtype, Attention(record["attention"]))
            names = [str(record[name]) for name in ("model_id", "weight_version", "adapter")]
            salt = bytes.fromhex(record["tenant_salt_hex"])
        except (ValueError, KeyError, StopIteration, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRequest(f"this is no namespace: {error!r}", field="namespace") from None
        return cls(names[0], names[1], layout, salt, names[2], *shard)

    def digest(self) -> bytes:
        """H_{-1}: 32 bytes."""
        return _namespace_digest(self)

    @property
    def tag(self) -> bytes:
        """First 16 bytes of the digest, by which members know the namespace."""
        return self.digest()[:NAMESPACE_TAG_BYTES]


@lru_cache(maxsize=1024)
def _namespace_digest(namespace: Namespace) -> bytes:
    layout = asdict(namespace.layout)
    layout["dtype"], layout["attention"] = namespace.layout.dtype.value[0], namespace.layout.attention.value
    record = {
        "quire": 1,
        "salt": namespace.tenant_salt,
        "model": namespace.model_id,
        "weights": namespace.weight_version,
        "adapter": namespace.adapter,
        "layout": layout,
        "shard": [namespace.shard_index, namespace.shard_count],
    }
    return hashlib.sha256(cbor2.dumps(record, canonical=True)).digest()


@lru_cache(maxsize=1024)
def tenant_name(salt: bytes) -> str:
    """Return a digest that does not reveal the salt. Empty for no salt."""
    return hashlib.blake2b(salt, digest_size=8, person=b"quire tenant").hexdigest() if salt else ""


def block_keys(
    namespace: Namespace,
    tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
    algorithm: HashAlgorithm | str = HashAlgorithm.SHA256_CBOR,
) -> ChunkKeys:
    """Keys of all whole chunks of `tokens`; a rest shorter than a chunk has none.

    `tokens`: one prompt, a sequence of numbers or a numpy array or torch tensor of one dimension. Raises `KeysInvalid`
    for anything else, for too many chunks, and by BLAKE3 for numbers that do not fit 32 bits.

    Each key stands for all tokens up to its chunk's end, so that equal beginnings have equal keys:

    >>> from quire.model.layout import Dtype, KvLayout
    >>> namespace = Namespace("llama-3", "a1b2", KvLayout(32, 16, 8, 128, Dtype.BF16))
    >>> short, long = block_keys(namespace, range(40)), block_keys(namespace, [*range(40), *range(60)])
    >>> len(short), len(long), long.run(0, 2) == short
    (2, 6, True)
    """
    size, ids = namespace.layout.chunk_tokens, _token_ids(tokens)
    algorithm = choice(HashAlgorithm, algorithm, "algorithm")
    count = len(ids) // size
    if count > KEYS_MAX:
        raise KeysInvalid(f"{len(ids)} tokens are {count} chunks, {KEYS_MAX} at most", field="tokens")
    root = hashlib.sha256(namespace.digest() + algorithm.value.encode()).digest()
    chain = _blake3_chain if algorithm is HashAlgorithm.BLAKE3 else _sha256_cbor_chain
    return ChunkKeys(b"".join(chain(root, ids, size, count)))


def _token_ids(tokens: Any) -> list[int]:
    shape = getattr(tokens, "shape", None)
    if shape is not None and len(shape) != 1:
        raise KeysInvalid(f"an array of shape {tuple(shape)}; one prompt has one dimension", field="tokens")
    ids = tokens.tolist() if shape is not None else list(tokens)
    if kinds := set(map(type, ids)) - {int}:
        if not all(issubclass(kind, np.integer) for kind in kinds):
            raise KeysInvalid(f"{min(kind.__name__ for kind in kinds)} in place of a number", field="tokens")
        ids = [int(token) for token in ids]
    return ids


def sha256_cbor(value: object) -> bytes:
    """SHA-256 over canonical CBOR, as vLLM's function of that name."""
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def engine_keys(namespace: Namespace, digests: ChunkKeys) -> ChunkKeys:
    """Keys of chunks for which an engine has its own chained digests: Hash(namespace ‖ digest)."""
    root = namespace.digest()
    return ChunkKeys(b"".join([hashlib.sha256(root + digest).digest() for digest in digests]))


def _sha256_cbor_chain(root: bytes, tokens: Sequence[int], size: int, count: int) -> list[bytes]:
    keys, parent = [], root
    for at in range(0, count * size, size):
        parent = sha256_cbor((parent, tuple(tokens[at : at + size]), None))
        keys.append(parent)
    return keys


def _blake3_chain(root: bytes, tokens: Sequence[int], size: int, count: int) -> list[bytes]:
    try:
        words = np.asarray(tokens, dtype="<u4").tobytes()
    except OverflowError:
        raise KeysInvalid("BLAKE3 keys are of tokens from 0 up to 4294967295", field="tokens") from None
    keys, parent = [], root
    for at in range(0, count * size * 4, size * 4):
        parent = blake3.blake3(parent + words[at : at + size * 4]).digest(length=KEY_BYTES)
        keys.append(parent)
    return keys
