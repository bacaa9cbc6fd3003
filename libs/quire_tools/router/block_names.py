"""Names of a prompt's blocks in Quire, computed as the engine that stores them computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.model.errors import InvalidRequest
from quire.model.hashing import Namespace, engine_keys, sha256_cbor
from quire.model.keys import KEYS_MAX, ChunkKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNaming:
    """An engine's way to name its blocks.

    Attributes:
        digest: Digest of all of its namespaces: engines with equal ones share blocks.
        namespace: Of the blocks that look-ups are about.
        hash_tokens: Tokens in each of the engine's hashes.
        parent: Stands for the parent in the first hash of a prompt.
    """

    digest: str
    namespace: Namespace
    hash_tokens: int
    parent: bytes

    @classmethod
    def of(cls, answer: Mapping[str, Any], tenant_salt: bytes) -> BlockNaming | None:
        """Read the `kv_transfer_params` of an engine that was asked to describe its blocks; None where it did not.

        Raises:
            InvalidRequest: The description is not understood.
        """
        description = answer.get("quire_blocks")
        if not isinstance(description, Mapping):
            return None
        try:
            namespace = Namespace.from_record(description["namespace"])
            hash_tokens, parent = int(description["hash_tokens"]), bytes.fromhex(description["parent"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{error!r}", field="quire_blocks") from None
        if hash_tokens < 1 or namespace.layout.chunk_tokens % hash_tokens:
            raise InvalidRequest(f"{hash_tokens} tokens for a hash", field="quire_blocks.hash_tokens")
        return cls(
            digest=str(answer.get("quire_names", "")),
            namespace=replace(namespace, tenant_salt=tenant_salt),
            hash_tokens=hash_tokens,
            parent=parent,
        )

    def keys(self, tokens: Sequence[int], cache_salt: str) -> ChunkKeys:
        """Return the keys of a prompt's whole blocks, as many as one question may have.

        The hashes are vLLM's `sha256_cbor`: of the parent's hash, the tokens, and for the first block the salt.
        """
        size, per_chunk = self.hash_tokens, self.namespace.layout.chunk_tokens // self.hash_tokens
        chunks = min(len(tokens) // (size * per_chunk), KEYS_MAX)
        parent, ends = self.parent, list[bytes]()
        extra: tuple[tuple[str, str], ...] | None = (("cache_salt", cache_salt),) if cache_salt else None
        for number in range(chunks * per_chunk):
            parent = sha256_cbor((parent, tuple(tokens[number * size : (number + 1) * size]), extra))
            extra = None
            if (number + 1) % per_chunk == 0:
                ends.append(parent)
        return engine_keys(self.namespace, ChunkKeys(b"".join(ends)))
