from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Attention(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTENTION_UNSPECIFIED: _ClassVar[Attention]
    ATTENTION_KV_HEADS: _ClassVar[Attention]
    ATTENTION_MLA: _ClassVar[Attention]

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FP32: _ClassVar[Dtype]
    DTYPE_FP16: _ClassVar[Dtype]
    DTYPE_BF16: _ClassVar[Dtype]
    DTYPE_FP8_E4M3: _ClassVar[Dtype]
    DTYPE_FP8_E5M2: _ClassVar[Dtype]

class DeliveryOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELIVERY_ORDER_UNSPECIFIED: _ClassVar[DeliveryOrder]
    DELIVERY_ORDER_AUTO: _ClassVar[DeliveryOrder]
    DELIVERY_ORDER_LAYERWISE: _ClassVar[DeliveryOrder]
    DELIVERY_ORDER_CHUNKWISE: _ClassVar[DeliveryOrder]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_LOCAL: _ClassVar[Durability]
    DURABILITY_REPLICATED: _ClassVar[Durability]
    DURABILITY_OBJECT: _ClassVar[Durability]

class OnExisting(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_EXISTING_UNSPECIFIED: _ClassVar[OnExisting]
    ON_EXISTING_SKIP: _ClassVar[OnExisting]
    ON_EXISTING_VERIFY: _ClassVar[OnExisting]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_STORAGE: _ClassVar[Role]
    ROLE_DECODER: _ClassVar[Role]
    ROLE_GATEWAY: _ClassVar[Role]
    ROLE_SCHEDULER: _ClassVar[Role]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_OK: _ClassVar[Verdict]
    VERDICT_WARN: _ClassVar[Verdict]
    VERDICT_ERR: _ClassVar[Verdict]

class StorageState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORAGE_STATE_UNSPECIFIED: _ClassVar[StorageState]
    STORAGE_STATE_ACTIVE: _ClassVar[StorageState]
    STORAGE_STATE_DRAINING: _ClassVar[StorageState]
    STORAGE_STATE_DECOMMISSIONED: _ClassVar[StorageState]
ATTENTION_UNSPECIFIED: Attention
ATTENTION_KV_HEADS: Attention
ATTENTION_MLA: Attention
DTYPE_UNSPECIFIED: Dtype
DTYPE_FP32: Dtype
DTYPE_FP16: Dtype
DTYPE_BF16: Dtype
DTYPE_FP8_E4M3: Dtype
DTYPE_FP8_E5M2: Dtype
DELIVERY_ORDER_UNSPECIFIED: DeliveryOrder
DELIVERY_ORDER_AUTO: DeliveryOrder
DELIVERY_ORDER_LAYERWISE: DeliveryOrder
DELIVERY_ORDER_CHUNKWISE: DeliveryOrder
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_LOCAL: Durability
DURABILITY_REPLICATED: Durability
DURABILITY_OBJECT: Durability
ON_EXISTING_UNSPECIFIED: OnExisting
ON_EXISTING_SKIP: OnExisting
ON_EXISTING_VERIFY: OnExisting
ROLE_UNSPECIFIED: Role
ROLE_STORAGE: Role
ROLE_DECODER: Role
ROLE_GATEWAY: Role
ROLE_SCHEDULER: Role
VERDICT_UNSPECIFIED: Verdict
VERDICT_OK: Verdict
VERDICT_WARN: Verdict
VERDICT_ERR: Verdict
STORAGE_STATE_UNSPECIFIED: StorageState
STORAGE_STATE_ACTIVE: StorageState
STORAGE_STATE_DRAINING: StorageState
STORAGE_STATE_DECOMMISSIONED: StorageState

class KvLayout(_message.Message):
    __slots__ = ("num_layers", "chunk_tokens", "attention", "kv_heads", "head_dim", "dtype")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    chunk_tokens: int
    attention: Attention
    kv_heads: int
    head_dim: int
    dtype: Dtype
    def __init__(self, num_layers: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., attention: _Optional[_Union[Attention, str]] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[Dtype, str]] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("tenant_salt", "model_id", "weight_version", "adapter", "layout", "shard_index", "shard_count")
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    tenant_salt: bytes
    model_id: str
    weight_version: str
    adapter: str
    layout: KvLayout
    shard_index: int
    shard_count: int
    def __init__(self, tenant_salt: _Optional[bytes] = ..., model_id: _Optional[str] = ..., weight_version: _Optional[str] = ..., adapter: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., shard_index: _Optional[int] = ..., shard_count: _Optional[int] = ...) -> None: ...

class RdmaTarget(_message.Message):
    __slots__ = ("worker_address", "address", "length", "remote_key", "proof")
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    REMOTE_KEY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    worker_address: bytes
    address: int
    length: int
    remote_key: bytes
    proof: bytes
    def __init__(self, worker_address: _Optional[bytes] = ..., address: _Optional[int] = ..., length: _Optional[int] = ..., remote_key: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Descriptor(_message.Message):
    __slots__ = ("chunk_keys", "num_layers", "chunk_tokens", "per_layer_chunk_bytes", "order", "target", "first_chunk", "chunk_count", "layer_stride", "chunk_offsets")
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PER_LAYER_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYER_STRIDE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    chunk_keys: bytes
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    order: DeliveryOrder
    target: RdmaTarget
    first_chunk: int
    chunk_count: int
    layer_stride: int
    chunk_offsets: bytes
    def __init__(self, chunk_keys: _Optional[bytes] = ..., num_layers: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., per_layer_chunk_bytes: _Optional[int] = ..., order: _Optional[_Union[DeliveryOrder, str]] = ..., target: _Optional[_Union[RdmaTarget, _Mapping]] = ..., first_chunk: _Optional[int] = ..., chunk_count: _Optional[int] = ..., layer_stride: _Optional[int] = ..., chunk_offsets: _Optional[bytes] = ...) -> None: ...

class NamespacePolicy(_message.Message):
    __slots__ = ("namespace", "ttl_s", "quota_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    ttl_s: int
    quota_bytes: int
    def __init__(self, namespace: _Optional[bytes] = ..., ttl_s: _Optional[int] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class ChunkRange(_message.Message):
    __slots__ = ("node_id", "first_chunk", "chunk_count")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    first_chunk: int
    chunk_count: int
    def __init__(self, node_id: _Optional[str] = ..., first_chunk: _Optional[int] = ..., chunk_count: _Optional[int] = ...) -> None: ...

class NodeAddress(_message.Message):
    __slots__ = ("node_id", "grpc_address", "worker_address", "protocol_version")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    grpc_address: str
    worker_address: bytes
    protocol_version: int
    def __init__(self, node_id: _Optional[str] = ..., grpc_address: _Optional[str] = ..., worker_address: _Optional[bytes] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class HealthCheck(_message.Message):
    __slots__ = ("code", "verdict", "node", "problem", "advice")
    CODE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    code: str
    verdict: Verdict
    node: str
    problem: str
    advice: str
    def __init__(self, code: _Optional[str] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., node: _Optional[str] = ..., problem: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "grpc_address", "incarnation", "protocol_version", "host", "zone", "storage", "decoder", "gateway", "scheduler", "stats", "tenant_stats", "notes", "running", "state", "away")
    class StatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TenantStatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class NotesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    TENANT_STATS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    grpc_address: str
    incarnation: str
    protocol_version: int
    host: str
    zone: str
    storage: StorageInfo
    decoder: DecoderInfo
    gateway: GatewayInfo
    scheduler: SchedulerInfo
    stats: _containers.ScalarMap[str, float]
    tenant_stats: _containers.ScalarMap[str, float]
    notes: _containers.ScalarMap[str, str]
    running: _containers.RepeatedCompositeFieldContainer[RunningDelivery]
    state: StorageState
    away: bool
    def __init__(self, node_id: _Optional[str] = ..., grpc_address: _Optional[str] = ..., incarnation: _Optional[str] = ..., protocol_version: _Optional[int] = ..., host: _Optional[str] = ..., zone: _Optional[str] = ..., storage: _Optional[_Union[StorageInfo, _Mapping]] = ..., decoder: _Optional[_Union[DecoderInfo, _Mapping]] = ..., gateway: _Optional[_Union[GatewayInfo, _Mapping]] = ..., scheduler: _Optional[_Union[SchedulerInfo, _Mapping]] = ..., stats: _Optional[_Mapping[str, float]] = ..., tenant_stats: _Optional[_Mapping[str, float]] = ..., notes: _Optional[_Mapping[str, str]] = ..., running: _Optional[_Iterable[_Union[RunningDelivery, _Mapping]]] = ..., state: _Optional[_Union[StorageState, str]] = ..., away: _Optional[bool] = ...) -> None: ...

class RunningDelivery(_message.Message):
    __slots__ = ("delivery_id", "tenant", "layers", "layers_sent", "bytes_per_layer", "rate_bytes_per_s", "running_ms")
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_LAYER_FIELD_NUMBER: _ClassVar[int]
    RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_MS_FIELD_NUMBER: _ClassVar[int]
    delivery_id: bytes
    tenant: str
    layers: int
    layers_sent: int
    bytes_per_layer: int
    rate_bytes_per_s: int
    running_ms: int
    def __init__(self, delivery_id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., layers: _Optional[int] = ..., layers_sent: _Optional[int] = ..., bytes_per_layer: _Optional[int] = ..., rate_bytes_per_s: _Optional[int] = ..., running_ms: _Optional[int] = ...) -> None: ...

class StorageInfo(_message.Message):
    __slots__ = ("worker_address", "capacity_bytes", "used_bytes", "link", "has_object_tier", "object_speed", "reached")
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    HAS_OBJECT_TIER_FIELD_NUMBER: _ClassVar[int]
    OBJECT_SPEED_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    worker_address: bytes
    capacity_bytes: int
    used_bytes: int
    link: str
    has_object_tier: bool
    object_speed: ObjectSpeed
    reached: StorageState
    def __init__(self, worker_address: _Optional[bytes] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., link: _Optional[str] = ..., has_object_tier: _Optional[bool] = ..., object_speed: _Optional[_Union[ObjectSpeed, _Mapping]] = ..., reached: _Optional[_Union[StorageState, str]] = ...) -> None: ...

class ObjectSpeed(_message.Message):
    __slots__ = ("latency_us", "request_us", "bytes_per_s")
    LATENCY_US_FIELD_NUMBER: _ClassVar[int]
    REQUEST_US_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    latency_us: int
    request_us: int
    bytes_per_s: int
    def __init__(self, latency_us: _Optional[int] = ..., request_us: _Optional[int] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class DecoderInfo(_message.Message):
    __slots__ = ("build", "capacity_bytes", "used_bytes", "vaes", "signer", "queued", "devices")
    BUILD_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    VAES_FIELD_NUMBER: _ClassVar[int]
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    build: str
    capacity_bytes: int
    used_bytes: int
    vaes: _containers.RepeatedCompositeFieldContainer[KnownVae]
    signer: str
    queued: int
    devices: int
    def __init__(self, build: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., vaes: _Optional[_Iterable[_Union[KnownVae, _Mapping]]] = ..., signer: _Optional[str] = ..., queued: _Optional[int] = ..., devices: _Optional[int] = ...) -> None: ...

class KnownVae(_message.Message):
    __slots__ = ("weights_sha256", "name", "class_name", "channels", "scale", "scaling_factor", "shift_factor", "latents_mean", "latents_std")
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SCALING_FACTOR_FIELD_NUMBER: _ClassVar[int]
    SHIFT_FACTOR_FIELD_NUMBER: _ClassVar[int]
    LATENTS_MEAN_FIELD_NUMBER: _ClassVar[int]
    LATENTS_STD_FIELD_NUMBER: _ClassVar[int]
    weights_sha256: str
    name: str
    class_name: str
    channels: int
    scale: int
    scaling_factor: float
    shift_factor: float
    latents_mean: _containers.RepeatedScalarFieldContainer[float]
    latents_std: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, weights_sha256: _Optional[str] = ..., name: _Optional[str] = ..., class_name: _Optional[str] = ..., channels: _Optional[int] = ..., scale: _Optional[int] = ..., scaling_factor: _Optional[float] = ..., shift_factor: _Optional[float] = ..., latents_mean: _Optional[_Iterable[float]] = ..., latents_std: _Optional[_Iterable[float]] = ...) -> None: ...

class GatewayInfo(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SchedulerInfo(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkRate]
    def __init__(self, links: _Optional[_Iterable[_Union[LinkRate, _Mapping]]] = ...) -> None: ...

class LinkRate(_message.Message):
    __slots__ = ("link", "bytes_per_s")
    LINK_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    link: str
    bytes_per_s: int
    def __init__(self, link: _Optional[str] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class NodeOutcome(_message.Message):
    __slots__ = ("node_id", "delivered", "ranges", "bytes", "order", "rate_bytes_per_s", "scheduled", "quiesced", "error_code", "error_message")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    delivered: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[ChunkRange]
    bytes: int
    order: DeliveryOrder
    rate_bytes_per_s: int
    scheduled: bool
    quiesced: bool
    error_code: str
    error_message: str
    def __init__(self, node_id: _Optional[str] = ..., delivered: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[ChunkRange, _Mapping]]] = ..., bytes: _Optional[int] = ..., order: _Optional[_Union[DeliveryOrder, str]] = ..., rate_bytes_per_s: _Optional[int] = ..., scheduled: _Optional[bool] = ..., quiesced: _Optional[bool] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ...) -> None: ...
