from quire.wire.v1 import common_pb2 as _common_pb2
from quire.wire.v1 import gateway_pb2 as _gateway_pb2
from quire.wire.v1 import images_pb2 as _images_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AllocateRequest(_message.Message):
    __slots__ = ("namespace", "chunk_keys", "first_chunk", "durability", "on_existing", "unchained")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    ON_EXISTING_FIELD_NUMBER: _ClassVar[int]
    UNCHAINED_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    chunk_keys: bytes
    first_chunk: int
    durability: _common_pb2.Durability
    on_existing: _common_pb2.OnExisting
    unchained: bool
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., chunk_keys: _Optional[bytes] = ..., first_chunk: _Optional[int] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., on_existing: _Optional[_Union[_common_pb2.OnExisting, str]] = ..., unchained: _Optional[bool] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("ranges", "known_chunks", "nodes")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChunkRange]
    known_chunks: int
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeAddress]
    def __init__(self, ranges: _Optional[_Iterable[_Union[_common_pb2.ChunkRange, _Mapping]]] = ..., known_chunks: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeAddress, _Mapping]]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("node_id", "chunks", "reporter", "fresh_generation", "within", "wait_ms", "records")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    FRESH_GENERATION_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRecord]
    reporter: str
    fresh_generation: int
    within: _containers.RepeatedScalarFieldContainer[int]
    wait_ms: int
    records: ChunkRecords
    def __init__(self, node_id: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[ChunkRecord, _Mapping]]] = ..., reporter: _Optional[str] = ..., fresh_generation: _Optional[int] = ..., within: _Optional[_Iterable[int]] = ..., wait_ms: _Optional[int] = ..., records: _Optional[_Union[ChunkRecords, _Mapping]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("node_id", "chunks", "generations", "records")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRecord]
    generations: _containers.RepeatedScalarFieldContainer[int]
    records: ChunkRecords
    def __init__(self, node_id: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[ChunkRecord, _Mapping]]] = ..., generations: _Optional[_Iterable[int]] = ..., records: _Optional[_Union[ChunkRecords, _Mapping]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("marks",)
    MARKS_FIELD_NUMBER: _ClassVar[int]
    marks: bytes
    def __init__(self, marks: _Optional[bytes] = ...) -> None: ...

class CommitObjectsRequest(_message.Message):
    __slots__ = ("chunks", "generations", "reporter", "records")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRecord]
    generations: _containers.RepeatedScalarFieldContainer[int]
    reporter: str
    records: ChunkRecords
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkRecord, _Mapping]]] = ..., generations: _Optional[_Iterable[int]] = ..., reporter: _Optional[str] = ..., records: _Optional[_Union[ChunkRecords, _Mapping]] = ...) -> None: ...

class CommitObjectsResponse(_message.Message):
    __slots__ = ("marks",)
    MARKS_FIELD_NUMBER: _ClassVar[int]
    marks: bytes
    def __init__(self, marks: _Optional[bytes] = ...) -> None: ...

class ExpectObjectsRequest(_message.Message):
    __slots__ = ("chunks", "records")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRecord]
    records: ChunkRecords
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkRecord, _Mapping]]] = ..., records: _Optional[_Union[ChunkRecords, _Mapping]] = ...) -> None: ...

class ExpectObjectsResponse(_message.Message):
    __slots__ = ("marks", "kept_ms")
    MARKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_MS_FIELD_NUMBER: _ClassVar[int]
    marks: bytes
    kept_ms: int
    def __init__(self, marks: _Optional[bytes] = ..., kept_ms: _Optional[int] = ...) -> None: ...

class GetListingRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class GetListingResponse(_message.Message):
    __slots__ = ("count", "digest", "changes")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    count: int
    digest: int
    changes: int
    def __init__(self, count: _Optional[int] = ..., digest: _Optional[int] = ..., changes: _Optional[int] = ...) -> None: ...

class ListHoldingsRequest(_message.Message):
    __slots__ = ("node_id", "cursor")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    cursor: int
    def __init__(self, node_id: _Optional[str] = ..., cursor: _Optional[int] = ...) -> None: ...

class ListHoldingsResponse(_message.Message):
    __slots__ = ("fingerprints", "buckets", "generations", "cursor")
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    fingerprints: bytes
    buckets: bytes
    generations: _containers.RepeatedScalarFieldContainer[int]
    cursor: int
    def __init__(self, fingerprints: _Optional[bytes] = ..., buckets: _Optional[bytes] = ..., generations: _Optional[_Iterable[int]] = ..., cursor: _Optional[int] = ...) -> None: ...

class WithdrawHeldRequest(_message.Message):
    __slots__ = ("node_id", "fingerprints", "buckets")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    fingerprints: bytes
    buckets: bytes
    def __init__(self, node_id: _Optional[str] = ..., fingerprints: _Optional[bytes] = ..., buckets: _Optional[bytes] = ...) -> None: ...

class WithdrawHeldResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportDamageRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class ReportDamageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRebuiltRequest(_message.Message):
    __slots__ = ("rebuild",)
    REBUILD_FIELD_NUMBER: _ClassVar[int]
    rebuild: str
    def __init__(self, rebuild: _Optional[str] = ...) -> None: ...

class ReportRebuiltResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChunkRecords(_message.Message):
    __slots__ = ("keys", "parents", "buckets", "parent_buckets", "namespaces", "reporter")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    PARENT_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    parents: bytes
    buckets: bytes
    parent_buckets: bytes
    namespaces: bytes
    reporter: str
    def __init__(self, keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., buckets: _Optional[bytes] = ..., parent_buckets: _Optional[bytes] = ..., namespaces: _Optional[bytes] = ..., reporter: _Optional[str] = ...) -> None: ...

class ChunkRecord(_message.Message):
    __slots__ = ("key", "parent", "bucket", "parent_bucket", "namespace")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    PARENT_BUCKET_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent: bytes
    bucket: bytes
    parent_bucket: bytes
    namespace: bytes
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., bucket: _Optional[bytes] = ..., parent_bucket: _Optional[bytes] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("generations",)
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generations: _Optional[_Iterable[int]] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("node_id", "chunks", "only_in_object_tier", "others_min", "reporter", "keepers", "all_generations", "hidden", "records")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ONLY_IN_OBJECT_TIER_FIELD_NUMBER: _ClassVar[int]
    OTHERS_MIN_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    KEEPERS_FIELD_NUMBER: _ClassVar[int]
    ALL_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRecord]
    only_in_object_tier: bool
    others_min: int
    reporter: str
    keepers: _containers.RepeatedScalarFieldContainer[str]
    all_generations: bool
    hidden: bool
    records: ChunkRecords
    def __init__(self, node_id: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[ChunkRecord, _Mapping]]] = ..., only_in_object_tier: _Optional[bool] = ..., others_min: _Optional[int] = ..., reporter: _Optional[str] = ..., keepers: _Optional[_Iterable[str]] = ..., all_generations: _Optional[bool] = ..., hidden: _Optional[bool] = ..., records: _Optional[_Union[ChunkRecords, _Mapping]] = ...) -> None: ...

class WithdrawResponse(_message.Message):
    __slots__ = ("withdrawn",)
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    withdrawn: bytes
    def __init__(self, withdrawn: _Optional[bytes] = ...) -> None: ...

class EvictChunksRequest(_message.Message):
    __slots__ = ("node_id", "chunks", "records")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRecord]
    records: ChunkRecords
    def __init__(self, node_id: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[ChunkRecord, _Mapping]]] = ..., records: _Optional[_Union[ChunkRecords, _Mapping]] = ...) -> None: ...

class EvictChunksResponse(_message.Message):
    __slots__ = ("evicted",)
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    evicted: bytes
    def __init__(self, evicted: _Optional[bytes] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("chunks", "records")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRecord]
    records: ChunkRecords
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkRecord, _Mapping]]] = ..., records: _Optional[_Union[ChunkRecords, _Mapping]] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, holders: _Optional[_Iterable[str]] = ...) -> None: ...

class GetGenerationsRequest(_message.Message):
    __slots__ = ("node_id", "chunks", "records")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRecord]
    records: ChunkRecords
    def __init__(self, node_id: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[ChunkRecord, _Mapping]]] = ..., records: _Optional[_Union[ChunkRecords, _Mapping]] = ...) -> None: ...

class GetGenerationsResponse(_message.Message):
    __slots__ = ("generations", "rebuilding")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    REBUILDING_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    rebuilding: bool
    def __init__(self, generations: _Optional[_Iterable[int]] = ..., rebuilding: _Optional[bool] = ...) -> None: ...

class Drop(_message.Message):
    __slots__ = ("chunk_key", "bucket", "generation")
    CHUNK_KEY_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    chunk_key: bytes
    bucket: bytes
    generation: int
    def __init__(self, chunk_key: _Optional[bytes] = ..., bucket: _Optional[bytes] = ..., generation: _Optional[int] = ...) -> None: ...

class TakeDropsRequest(_message.Message):
    __slots__ = ("node_id", "cursor")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    cursor: int
    def __init__(self, node_id: _Optional[str] = ..., cursor: _Optional[int] = ...) -> None: ...

class TakeDropsResponse(_message.Message):
    __slots__ = ("drops", "cursor")
    DROPS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    drops: _containers.RepeatedCompositeFieldContainer[Drop]
    cursor: int
    def __init__(self, drops: _Optional[_Iterable[_Union[Drop, _Mapping]]] = ..., cursor: _Optional[int] = ...) -> None: ...

class SettleDropsRequest(_message.Message):
    __slots__ = ("node_id", "drops")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    drops: _containers.RepeatedCompositeFieldContainer[Drop]
    def __init__(self, node_id: _Optional[str] = ..., drops: _Optional[_Iterable[_Union[Drop, _Mapping]]] = ...) -> None: ...

class SettleDropsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node", "members_version", "proof")
    NODE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.Node
    members_version: str
    proof: bytes
    def __init__(self, node: _Optional[_Union[_common_pb2.Node, _Mapping]] = ..., members_version: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("interval_ms", "index_epoch", "theta_bytes", "listed_chunks", "listed_digest", "rebuild", "changes", "has_listing", "members", "gone", "all_members", "members_version", "now_ms", "theta_object_bytes", "state")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    INDEX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    THETA_BYTES_FIELD_NUMBER: _ClassVar[int]
    LISTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LISTED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REBUILD_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    HAS_LISTING_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ALL_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    THETA_OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    index_epoch: str
    theta_bytes: int
    listed_chunks: int
    listed_digest: int
    rebuild: str
    changes: int
    has_listing: bool
    members: _containers.RepeatedCompositeFieldContainer[_common_pb2.Node]
    gone: _containers.RepeatedScalarFieldContainer[str]
    all_members: bool
    members_version: str
    now_ms: int
    theta_object_bytes: int
    state: _common_pb2.StorageState
    def __init__(self, interval_ms: _Optional[int] = ..., index_epoch: _Optional[str] = ..., theta_bytes: _Optional[int] = ..., listed_chunks: _Optional[int] = ..., listed_digest: _Optional[int] = ..., rebuild: _Optional[str] = ..., changes: _Optional[int] = ..., has_listing: _Optional[bool] = ..., members: _Optional[_Iterable[_Union[_common_pb2.Node, _Mapping]]] = ..., gone: _Optional[_Iterable[str]] = ..., all_members: _Optional[bool] = ..., members_version: _Optional[str] = ..., now_ms: _Optional[int] = ..., theta_object_bytes: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.StorageState, str]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("node_id", "incarnation")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ("role", "with_away", "with_checks")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WITH_AWAY_FIELD_NUMBER: _ClassVar[int]
    WITH_CHECKS_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    with_away: bool
    with_checks: bool
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., with_away: _Optional[bool] = ..., with_checks: _Optional[bool] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes", "checks", "checked")
    NODES_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.Node]
    checks: _containers.RepeatedCompositeFieldContainer[_common_pb2.HealthCheck]
    checked: bool
    def __init__(self, nodes: _Optional[_Iterable[_Union[_common_pb2.Node, _Mapping]]] = ..., checks: _Optional[_Iterable[_Union[_common_pb2.HealthCheck, _Mapping]]] = ..., checked: _Optional[bool] = ...) -> None: ...
