"""Policies: quota and time to live of a namespace; a tenant's share of links, and its quota."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.model.errors import InvalidRequest

NAMESPACE_TAG_BYTES: Final = 16
WEIGHT_MIN: Final = 1e-3
WEIGHT_MAX: Final = 1e3
_TTL_S_MAX: Final = 100 * 365 * 24 * 3600

ENTRY_BYTES: Final = 1024
"""What each S3 object, part, upload, bucket and image counts for in Redis, besides its bytes."""


@dataclass(frozen=True, slots=True)
class NamespacePolicy:
    """`namespace`: first 16 bytes of its digest; `ttl_s`, counted from storing, and `quota_bytes`: 0 for no limit."""

    namespace: bytes
    ttl_s: int
    quota_bytes: int

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_TAG_BYTES:
            raise InvalidRequest(f"{len(self.namespace)} bytes, {NAMESPACE_TAG_BYTES} are needed", field="namespace")
        if not 0 <= self.ttl_s <= _TTL_S_MAX:
            raise InvalidRequest(f"{self.ttl_s} is not in 0..{_TTL_S_MAX}", field="ttl_s")
        if self.quota_bytes < 0:
            raise InvalidRequest(f"{self.quota_bytes} is negative", field="quota_bytes")


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """`tenant`: `Namespace.tenant`.

    Of a contended link it gets a part in proportion to `weight`, and never more than `cap_bytes_per_s` (0 for no cap).
    It may have `stored_bytes_max` (0 for no limit) of S3 objects, image records and chunks together: objects and images
    beyond it are refused, chunks go, the coldest first.
    """

    tenant: str = ""
    weight: float = 1.0
    cap_bytes_per_s: int = 0
    stored_bytes_max: int = 0

    def __post_init__(self) -> None:
        if not WEIGHT_MIN <= self.weight <= WEIGHT_MAX:
            raise InvalidRequest(f"{self.weight} is not within {WEIGHT_MIN}..{WEIGHT_MAX}", field="weight")
        if self.cap_bytes_per_s < 0:
            raise InvalidRequest(f"{self.cap_bytes_per_s} is negative", field="cap_bytes_per_s")
        if self.stored_bytes_max < 0:
            raise InvalidRequest(f"{self.stored_bytes_max} is negative", field="stored_bytes_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantState:
    """A tenant's policy, and, if it has a quota, the bytes under it.

    `kept_bytes`: S3 objects and image records. `namespaces`: tags of the namespaces that it has stored chunks in.
    `name`: the tenant's, where an access key has it.
    """

    policy: TenantPolicy
    kept_bytes: int = 0
    namespaces: frozenset[bytes] = frozenset()
    name: str = ""

    @property
    def chunk_bytes_max(self) -> int:
        """Quota of its chunks in bytes."""
        return max(0, self.policy.stored_bytes_max - self.kept_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyList:
    """Policies of namespaces and tenants. `storage_nodes`: how many share the quotas."""

    namespaces: tuple[NamespacePolicy, ...] = ()
    tenants: tuple[TenantState, ...] = ()
    storage_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Theta:
    """The thresholds Θ (ObjectCache, Eq. 2), in bytes: payloads below them are delivered chunkwise.

    Attributes:
        held_bytes: For payloads that nodes hold; 0 for each node's own setting.
        object_bytes: For payloads with chunks that only the object tier has; 0 for each node's own setting.
    """

    held_bytes: int = 0
    object_bytes: int = 0
