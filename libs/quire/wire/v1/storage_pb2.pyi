from quire.wire.v1 import common_pb2 as _common_pb2
from quire.wire.v1 import gateway_pb2 as _gateway_pb2
from quire.wire.v1 import orchestrator_pb2 as _orchestrator_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeliverRequest(_message.Message):
    __slots__ = ("lease", "delivery_id", "descriptor", "ranges", "node_index", "compute_window_us", "layers_in_stream", "permit", "tenant_weight", "tenant_cap_bytes_per_s", "unchained", "namespace", "first_layer_us", "priority", "arriving", "follow_ms")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_WINDOW_US_FIELD_NUMBER: _ClassVar[int]
    LAYERS_IN_STREAM_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TENANT_CAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    UNCHAINED_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_US_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_MS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    delivery_id: bytes
    descriptor: _common_pb2.Descriptor
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChunkRange]
    node_index: int
    compute_window_us: int
    layers_in_stream: bool
    permit: bytes
    tenant_weight: float
    tenant_cap_bytes_per_s: int
    unchained: bool
    namespace: bytes
    first_layer_us: int
    priority: int
    arriving: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChunkRange]
    follow_ms: int
    def __init__(self, lease: _Optional[bytes] = ..., delivery_id: _Optional[bytes] = ..., descriptor: _Optional[_Union[_common_pb2.Descriptor, _Mapping]] = ..., ranges: _Optional[_Iterable[_Union[_common_pb2.ChunkRange, _Mapping]]] = ..., node_index: _Optional[int] = ..., compute_window_us: _Optional[int] = ..., layers_in_stream: _Optional[bool] = ..., permit: _Optional[bytes] = ..., tenant_weight: _Optional[float] = ..., tenant_cap_bytes_per_s: _Optional[int] = ..., unchained: _Optional[bool] = ..., namespace: _Optional[bytes] = ..., first_layer_us: _Optional[int] = ..., priority: _Optional[int] = ..., arriving: _Optional[_Iterable[_Union[_common_pb2.ChunkRange, _Mapping]]] = ..., follow_ms: _Optional[int] = ...) -> None: ...

class DeliverResponse(_message.Message):
    __slots__ = ("layer", "outcome")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    layer: _gateway_pb2.LayerArrived
    outcome: _common_pb2.NodeOutcome
    def __init__(self, layer: _Optional[_Union[_gateway_pb2.LayerArrived, _Mapping]] = ..., outcome: _Optional[_Union[_common_pb2.NodeOutcome, _Mapping]] = ...) -> None: ...

class IngestRequest(_message.Message):
    __slots__ = ("layout", "namespace_digest", "chunks", "store_id", "source", "source_ranges", "source_chunk_count", "node_index", "durability", "on_existing", "source_complete", "permit", "records")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANGES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    ON_EXISTING_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    layout: _common_pb2.KvLayout
    namespace_digest: bytes
    chunks: _containers.RepeatedCompositeFieldContainer[_orchestrator_pb2.ChunkRecord]
    store_id: bytes
    source: _common_pb2.RdmaTarget
    source_ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChunkRange]
    source_chunk_count: int
    node_index: int
    durability: _common_pb2.Durability
    on_existing: _common_pb2.OnExisting
    source_complete: bool
    permit: bytes
    records: _orchestrator_pb2.ChunkRecords
    def __init__(self, layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., namespace_digest: _Optional[bytes] = ..., chunks: _Optional[_Iterable[_Union[_orchestrator_pb2.ChunkRecord, _Mapping]]] = ..., store_id: _Optional[bytes] = ..., source: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., source_ranges: _Optional[_Iterable[_Union[_common_pb2.ChunkRange, _Mapping]]] = ..., source_chunk_count: _Optional[int] = ..., node_index: _Optional[int] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., on_existing: _Optional[_Union[_common_pb2.OnExisting, str]] = ..., source_complete: _Optional[bool] = ..., permit: _Optional[bytes] = ..., records: _Optional[_Union[_orchestrator_pb2.ChunkRecords, _Mapping]] = ...) -> None: ...

class IngestResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _common_pb2.NodeOutcome
    def __init__(self, outcome: _Optional[_Union[_common_pb2.NodeOutcome, _Mapping]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("transfer_id", "node_index", "refuse_ms", "permit")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    REFUSE_MS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    node_index: int
    refuse_ms: int
    permit: bytes
    def __init__(self, transfer_id: _Optional[bytes] = ..., node_index: _Optional[int] = ..., refuse_ms: _Optional[int] = ..., permit: _Optional[bytes] = ...) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("chunk_keys", "generations", "permit", "node_id", "incarnation")
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    chunk_keys: bytes
    generations: _containers.RepeatedScalarFieldContainer[int]
    permit: bytes
    node_id: str
    incarnation: str
    def __init__(self, chunk_keys: _Optional[bytes] = ..., generations: _Optional[_Iterable[int]] = ..., permit: _Optional[bytes] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class DropResponse(_message.Message):
    __slots__ = ("dropped_chunks",)
    DROPPED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    dropped_chunks: int
    def __init__(self, dropped_chunks: _Optional[int] = ...) -> None: ...

class DeleteObjectsRequest(_message.Message):
    __slots__ = ("chunk_keys", "until_ms", "permit")
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    chunk_keys: bytes
    until_ms: int
    permit: bytes
    def __init__(self, chunk_keys: _Optional[bytes] = ..., until_ms: _Optional[int] = ..., permit: _Optional[bytes] = ...) -> None: ...

class DeleteObjectsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompareIndexRequest(_message.Message):
    __slots__ = ("index_epoch", "changes", "permit")
    INDEX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    index_epoch: str
    changes: int
    permit: bytes
    def __init__(self, index_epoch: _Optional[str] = ..., changes: _Optional[int] = ..., permit: _Optional[bytes] = ...) -> None: ...

class CompareIndexResponse(_message.Message):
    __slots__ = ("current",)
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    current: bool
    def __init__(self, current: _Optional[bool] = ...) -> None: ...

class RaiseRequest(_message.Message):
    __slots__ = ("chunk_keys", "durability", "permit")
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    chunk_keys: bytes
    durability: _common_pb2.Durability
    permit: bytes
    def __init__(self, chunk_keys: _Optional[bytes] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., permit: _Optional[bytes] = ...) -> None: ...

class GiveUpRequest(_message.Message):
    __slots__ = ("chunk_keys", "permit")
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    chunk_keys: bytes
    permit: bytes
    def __init__(self, chunk_keys: _Optional[bytes] = ..., permit: _Optional[bytes] = ...) -> None: ...

class GiveUpResponse(_message.Message):
    __slots__ = ("gone",)
    GONE_FIELD_NUMBER: _ClassVar[int]
    gone: bytes
    def __init__(self, gone: _Optional[bytes] = ...) -> None: ...

class RaiseResponse(_message.Message):
    __slots__ = ("raised",)
    RAISED_FIELD_NUMBER: _ClassVar[int]
    raised: bytes
    def __init__(self, raised: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("chunk_keys", "permit")
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    chunk_keys: bytes
    permit: bytes
    def __init__(self, chunk_keys: _Optional[bytes] = ..., permit: _Optional[bytes] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("headers",)
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    headers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, headers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefetchChunksRequest(_message.Message):
    __slots__ = ("chunk_keys", "within_ms", "permit", "ranges", "layout", "namespace", "prefix_keys")
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEYS_FIELD_NUMBER: _ClassVar[int]
    chunk_keys: bytes
    within_ms: int
    permit: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChunkRange]
    layout: _common_pb2.KvLayout
    namespace: bytes
    prefix_keys: bytes
    def __init__(self, chunk_keys: _Optional[bytes] = ..., within_ms: _Optional[int] = ..., permit: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[_common_pb2.ChunkRange, _Mapping]]] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., namespace: _Optional[bytes] = ..., prefix_keys: _Optional[bytes] = ...) -> None: ...

class PrefetchChunksResponse(_message.Message):
    __slots__ = ("in_memory",)
    IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    in_memory: bytes
    def __init__(self, in_memory: _Optional[bytes] = ...) -> None: ...

class SendNonceRequest(_message.Message):
    __slots__ = ("target", "nonce", "permit")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    target: _common_pb2.RdmaTarget
    nonce: bytes
    permit: bytes
    def __init__(self, target: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., nonce: _Optional[bytes] = ..., permit: _Optional[bytes] = ...) -> None: ...

class SendNonceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("chunk_keys", "source", "hot", "permit", "generations", "level")
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HOT_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    chunk_keys: bytes
    source: _common_pb2.Node
    hot: bool
    permit: bytes
    generations: _containers.RepeatedScalarFieldContainer[int]
    level: _common_pb2.Durability
    def __init__(self, chunk_keys: _Optional[bytes] = ..., source: _Optional[_Union[_common_pb2.Node, _Mapping]] = ..., hot: _Optional[bool] = ..., permit: _Optional[bytes] = ..., generations: _Optional[_Iterable[int]] = ..., level: _Optional[_Union[_common_pb2.Durability, str]] = ...) -> None: ...

class ReplicateResponse(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: bytes
    def __init__(self, kept: _Optional[bytes] = ...) -> None: ...
