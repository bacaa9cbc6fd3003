from quire.wire.v1 import common_pb2 as _common_pb2
from quire.wire.v1 import images_pb2 as _images_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_EVENT_KIND_UNSPECIFIED: _ClassVar[CacheEventKind]
    CACHE_EVENT_KIND_STORED: _ClassVar[CacheEventKind]
    CACHE_EVENT_KIND_REMOVED: _ClassVar[CacheEventKind]
    CACHE_EVENT_KIND_CLEARED: _ClassVar[CacheEventKind]
CACHE_EVENT_KIND_UNSPECIFIED: CacheEventKind
CACHE_EVENT_KIND_STORED: CacheEventKind
CACHE_EVENT_KIND_REMOVED: CacheEventKind
CACHE_EVENT_KIND_CLEARED: CacheEventKind

class SessionRequest(_message.Message):
    __slots__ = ("id", "received", "timeout_ms", "traceparent", "renew", "cancel", "close", "lookup", "fetch", "store", "release", "evict", "put_latent", "get_latent", "head_image", "get_image", "delete_image", "list_images", "status", "retrieve", "retain", "prefetch", "prove_address", "demote", "assign", "put_picture")
    ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    PUT_LATENT_FIELD_NUMBER: _ClassVar[int]
    GET_LATENT_FIELD_NUMBER: _ClassVar[int]
    HEAD_IMAGE_FIELD_NUMBER: _ClassVar[int]
    GET_IMAGE_FIELD_NUMBER: _ClassVar[int]
    DELETE_IMAGE_FIELD_NUMBER: _ClassVar[int]
    LIST_IMAGES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRIEVE_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    PROVE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEMOTE_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    PUT_PICTURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    received: int
    timeout_ms: int
    traceparent: str
    renew: SessionRenew
    cancel: int
    close: SessionClose
    lookup: LookupRequest
    fetch: FetchRequest
    store: StoreRequest
    release: ReleaseRequest
    evict: EvictRequest
    put_latent: _images_pb2.PutLatentRequest
    get_latent: _images_pb2.GetLatentRequest
    head_image: _images_pb2.HeadImageRequest
    get_image: _images_pb2.GetImageRequest
    delete_image: _images_pb2.DeleteImageRequest
    list_images: _images_pb2.ListImagesRequest
    status: StatusRequest
    retrieve: RetrieveRequest
    retain: RetainRequest
    prefetch: PrefetchRequest
    prove_address: ProveAddressRequest
    demote: DemoteRequest
    assign: AssignRequest
    put_picture: _images_pb2.PutPictureRequest
    def __init__(self, id: _Optional[int] = ..., received: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., renew: _Optional[_Union[SessionRenew, _Mapping]] = ..., cancel: _Optional[int] = ..., close: _Optional[_Union[SessionClose, _Mapping]] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., fetch: _Optional[_Union[FetchRequest, _Mapping]] = ..., store: _Optional[_Union[StoreRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., evict: _Optional[_Union[EvictRequest, _Mapping]] = ..., put_latent: _Optional[_Union[_images_pb2.PutLatentRequest, _Mapping]] = ..., get_latent: _Optional[_Union[_images_pb2.GetLatentRequest, _Mapping]] = ..., head_image: _Optional[_Union[_images_pb2.HeadImageRequest, _Mapping]] = ..., get_image: _Optional[_Union[_images_pb2.GetImageRequest, _Mapping]] = ..., delete_image: _Optional[_Union[_images_pb2.DeleteImageRequest, _Mapping]] = ..., list_images: _Optional[_Union[_images_pb2.ListImagesRequest, _Mapping]] = ..., status: _Optional[_Union[StatusRequest, _Mapping]] = ..., retrieve: _Optional[_Union[RetrieveRequest, _Mapping]] = ..., retain: _Optional[_Union[RetainRequest, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchRequest, _Mapping]] = ..., prove_address: _Optional[_Union[ProveAddressRequest, _Mapping]] = ..., demote: _Optional[_Union[DemoteRequest, _Mapping]] = ..., assign: _Optional[_Union[AssignRequest, _Mapping]] = ..., put_picture: _Optional[_Union[_images_pb2.PutPictureRequest, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("id", "number", "heard", "last", "opened", "leaving", "error", "stopped", "lookup", "fetch", "store", "release", "evict", "put_latent", "get_latent", "head_image", "get_image", "delete_image", "list_images", "status", "retrieve", "retain", "prefetch", "prove_address", "demote", "assign", "put_picture")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    PUT_LATENT_FIELD_NUMBER: _ClassVar[int]
    GET_LATENT_FIELD_NUMBER: _ClassVar[int]
    HEAD_IMAGE_FIELD_NUMBER: _ClassVar[int]
    GET_IMAGE_FIELD_NUMBER: _ClassVar[int]
    DELETE_IMAGE_FIELD_NUMBER: _ClassVar[int]
    LIST_IMAGES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRIEVE_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    PROVE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEMOTE_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    PUT_PICTURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    number: int
    heard: int
    last: bool
    opened: SessionOpened
    leaving: SessionLeaving
    error: SessionError
    stopped: SessionStopped
    lookup: LookupResponse
    fetch: FetchResponse
    store: StoreResponse
    release: ReleaseResponse
    evict: EvictResponse
    put_latent: _images_pb2.PutLatentResponse
    get_latent: _images_pb2.GetLatentResponse
    head_image: _images_pb2.HeadImageResponse
    get_image: _images_pb2.GetImageResponse
    delete_image: _images_pb2.DeleteImageResponse
    list_images: _images_pb2.ListImagesResponse
    status: StatusResponse
    retrieve: RetrieveResponse
    retain: RetainResponse
    prefetch: PrefetchResponse
    prove_address: ProveAddressResponse
    demote: DemoteResponse
    assign: AssignResponse
    put_picture: _images_pb2.PutPictureResponse
    def __init__(self, id: _Optional[int] = ..., number: _Optional[int] = ..., heard: _Optional[int] = ..., last: _Optional[bool] = ..., opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., leaving: _Optional[_Union[SessionLeaving, _Mapping]] = ..., error: _Optional[_Union[SessionError, _Mapping]] = ..., stopped: _Optional[_Union[SessionStopped, _Mapping]] = ..., lookup: _Optional[_Union[LookupResponse, _Mapping]] = ..., fetch: _Optional[_Union[FetchResponse, _Mapping]] = ..., store: _Optional[_Union[StoreResponse, _Mapping]] = ..., release: _Optional[_Union[ReleaseResponse, _Mapping]] = ..., evict: _Optional[_Union[EvictResponse, _Mapping]] = ..., put_latent: _Optional[_Union[_images_pb2.PutLatentResponse, _Mapping]] = ..., get_latent: _Optional[_Union[_images_pb2.GetLatentResponse, _Mapping]] = ..., head_image: _Optional[_Union[_images_pb2.HeadImageResponse, _Mapping]] = ..., get_image: _Optional[_Union[_images_pb2.GetImageResponse, _Mapping]] = ..., delete_image: _Optional[_Union[_images_pb2.DeleteImageResponse, _Mapping]] = ..., list_images: _Optional[_Union[_images_pb2.ListImagesResponse, _Mapping]] = ..., status: _Optional[_Union[StatusResponse, _Mapping]] = ..., retrieve: _Optional[_Union[RetrieveResponse, _Mapping]] = ..., retain: _Optional[_Union[RetainResponse, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchResponse, _Mapping]] = ..., prove_address: _Optional[_Union[ProveAddressResponse, _Mapping]] = ..., demote: _Optional[_Union[DemoteResponse, _Mapping]] = ..., assign: _Optional[_Union[AssignResponse, _Mapping]] = ..., put_picture: _Optional[_Union[_images_pb2.PutPictureResponse, _Mapping]] = ...) -> None: ...

class SessionStopped(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session", "resumed", "renew_ms", "grace_ms", "takes_samples")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RENEW_MS_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    TAKES_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    resumed: bool
    renew_ms: int
    grace_ms: int
    takes_samples: bool
    def __init__(self, session: _Optional[bytes] = ..., resumed: _Optional[bool] = ..., renew_ms: _Optional[int] = ..., grace_ms: _Optional[int] = ..., takes_samples: _Optional[bool] = ...) -> None: ...

class SessionRenew(_message.Message):
    __slots__ = ("authorization",)
    AUTHORIZATION_FIELD_NUMBER: _ClassVar[int]
    authorization: str
    def __init__(self, authorization: _Optional[str] = ...) -> None: ...

class SessionClose(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionLeaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionError(_message.Message):
    __slots__ = ("status", "message", "trailers")
    class TrailersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRAILERS_FIELD_NUMBER: _ClassVar[int]
    status: int
    message: str
    trailers: _containers.ScalarMap[str, str]
    def __init__(self, status: _Optional[int] = ..., message: _Optional[str] = ..., trailers: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListClusterSpansRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class ListClusterSpansResponse(_message.Message):
    __slots__ = ("member", "spans", "error")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    member: str
    spans: _containers.RepeatedScalarFieldContainer[bytes]
    error: str
    def __init__(self, member: _Optional[str] = ..., spans: _Optional[_Iterable[bytes]] = ..., error: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: str
    def __init__(self, after: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("events", "cursor", "lost")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    cursor: str
    lost: bool
    def __init__(self, events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ..., cursor: _Optional[str] = ..., lost: _Optional[bool] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("kind", "holder", "chunk_keys", "parent_keys", "at_ms", "namespace")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEYS_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    kind: CacheEventKind
    holder: str
    chunk_keys: bytes
    parent_keys: bytes
    at_ms: int
    namespace: bytes
    def __init__(self, kind: _Optional[_Union[CacheEventKind, str]] = ..., holder: _Optional[str] = ..., chunk_keys: _Optional[bytes] = ..., parent_keys: _Optional[bytes] = ..., at_ms: _Optional[int] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("namespace", "ttl_s", "quota_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    ttl_s: int
    quota_bytes: int
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., ttl_s: _Optional[int] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: _common_pb2.NamespacePolicy
    def __init__(self, policy: _Optional[_Union[_common_pb2.NamespacePolicy, _Mapping]] = ...) -> None: ...

class SetTenantRequest(_message.Message):
    __slots__ = ("tenant_salt", "weight", "cap_bytes_per_s", "stored_bytes_max", "name")
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant_salt: bytes
    weight: float
    cap_bytes_per_s: int
    stored_bytes_max: int
    name: str
    def __init__(self, tenant_salt: _Optional[bytes] = ..., weight: _Optional[float] = ..., cap_bytes_per_s: _Optional[int] = ..., stored_bytes_max: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class SetTenantResponse(_message.Message):
    __slots__ = ("weight", "cap_bytes_per_s", "stored_bytes_max")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    weight: float
    cap_bytes_per_s: int
    stored_bytes_max: int
    def __init__(self, weight: _Optional[float] = ..., cap_bytes_per_s: _Optional[int] = ..., stored_bytes_max: _Optional[int] = ...) -> None: ...

class ListPoliciesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoliciesResponse(_message.Message):
    __slots__ = ("policies", "storage_nodes", "tenants")
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_NODES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[_common_pb2.NamespacePolicy]
    storage_nodes: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantState]
    def __init__(self, policies: _Optional[_Iterable[_Union[_common_pb2.NamespacePolicy, _Mapping]]] = ..., storage_nodes: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantState, _Mapping]]] = ...) -> None: ...

class TenantState(_message.Message):
    __slots__ = ("tenant", "weight", "cap_bytes_per_s", "stored_bytes_max", "kept_bytes", "namespaces", "name")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    cap_bytes_per_s: int
    stored_bytes_max: int
    kept_bytes: int
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    name: str
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., cap_bytes_per_s: _Optional[int] = ..., stored_bytes_max: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., namespaces: _Optional[_Iterable[bytes]] = ..., name: _Optional[str] = ...) -> None: ...

class SetThetaRequest(_message.Message):
    __slots__ = ("theta_bytes",)
    THETA_BYTES_FIELD_NUMBER: _ClassVar[int]
    theta_bytes: int
    def __init__(self, theta_bytes: _Optional[int] = ...) -> None: ...

class SetThetaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetDrainingRequest(_message.Message):
    __slots__ = ("node_id", "draining")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    draining: bool
    def __init__(self, node_id: _Optional[str] = ..., draining: _Optional[bool] = ...) -> None: ...

class SetDrainingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecommissionRequest(_message.Message):
    __slots__ = ("node_id", "lose_chunks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LOSE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lose_chunks: bool
    def __init__(self, node_id: _Optional[str] = ..., lose_chunks: _Optional[bool] = ...) -> None: ...

class DecommissionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckRemovalRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class CheckRemovalResponse(_message.Message):
    __slots__ = ("state", "alive", "sole_chunks", "drained", "safe", "reason", "left_chunks")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    SOLE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    SAFE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    state: _common_pb2.StorageState
    alive: bool
    sole_chunks: int
    drained: bool
    safe: bool
    reason: str
    left_chunks: int
    def __init__(self, state: _Optional[_Union[_common_pb2.StorageState, str]] = ..., alive: _Optional[bool] = ..., sole_chunks: _Optional[int] = ..., drained: _Optional[bool] = ..., safe: _Optional[bool] = ..., reason: _Optional[str] = ..., left_chunks: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace", "chunk_keys", "tokens", "lease_ttl_ms", "host", "zone", "prompt_tokens", "device", "unchained", "other_shards", "sample")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UNCHAINED_FIELD_NUMBER: _ClassVar[int]
    OTHER_SHARDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    chunk_keys: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    lease_ttl_ms: int
    host: str
    zone: str
    prompt_tokens: int
    device: str
    unchained: bool
    other_shards: _containers.RepeatedCompositeFieldContainer[ShardKeys]
    sample: KeySample
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., chunk_keys: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., lease_ttl_ms: _Optional[int] = ..., host: _Optional[str] = ..., zone: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., device: _Optional[str] = ..., unchained: _Optional[bool] = ..., other_shards: _Optional[_Iterable[_Union[ShardKeys, _Mapping]]] = ..., sample: _Optional[_Union[KeySample, _Mapping]] = ...) -> None: ...

class ShardKeys(_message.Message):
    __slots__ = ("namespace", "chunk_keys", "sample")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    chunk_keys: bytes
    sample: KeySample
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., chunk_keys: _Optional[bytes] = ..., sample: _Optional[_Union[KeySample, _Mapping]] = ...) -> None: ...

class KeySample(_message.Message):
    __slots__ = ("count", "whole_bucket", "keys")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BUCKET_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    count: int
    whole_bucket: int
    keys: bytes
    def __init__(self, count: _Optional[int] = ..., whole_bucket: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("matched_chunks", "lease", "lease_expires_ms", "ranges", "nodes", "index_us", "advice", "found", "object_ranges", "object_speeds", "arriving_chunks", "other_shards", "wanted_bucket")
    class ObjectSpeedsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.ObjectSpeed
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.ObjectSpeed, _Mapping]] = ...) -> None: ...
    MATCHED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    INDEX_US_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    OBJECT_RANGES_FIELD_NUMBER: _ClassVar[int]
    OBJECT_SPEEDS_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    OTHER_SHARDS_FIELD_NUMBER: _ClassVar[int]
    WANTED_BUCKET_FIELD_NUMBER: _ClassVar[int]
    matched_chunks: int
    lease: bytes
    lease_expires_ms: int
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChunkRange]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeAddress]
    index_us: int
    advice: Advice
    found: bytes
    object_ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChunkRange]
    object_speeds: _containers.MessageMap[str, _common_pb2.ObjectSpeed]
    arriving_chunks: int
    other_shards: _containers.RepeatedCompositeFieldContainer[LookupResponse]
    wanted_bucket: int
    def __init__(self, matched_chunks: _Optional[int] = ..., lease: _Optional[bytes] = ..., lease_expires_ms: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[_common_pb2.ChunkRange, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeAddress, _Mapping]]] = ..., index_us: _Optional[int] = ..., advice: _Optional[_Union[Advice, _Mapping]] = ..., found: _Optional[bytes] = ..., object_ranges: _Optional[_Iterable[_Union[_common_pb2.ChunkRange, _Mapping]]] = ..., object_speeds: _Optional[_Mapping[str, _common_pb2.ObjectSpeed]] = ..., arriving_chunks: _Optional[int] = ..., other_shards: _Optional[_Iterable[_Union[LookupResponse, _Mapping]]] = ..., wanted_bucket: _Optional[int] = ...) -> None: ...

class Advice(_message.Message):
    __slots__ = ("take_chunks", "compute_window_us", "rate_bytes_per_s", "ttft_us", "ttft_all_us", "ttft_none_us")
    TAKE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_WINDOW_US_FIELD_NUMBER: _ClassVar[int]
    RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    TTFT_ALL_US_FIELD_NUMBER: _ClassVar[int]
    TTFT_NONE_US_FIELD_NUMBER: _ClassVar[int]
    take_chunks: int
    compute_window_us: int
    rate_bytes_per_s: int
    ttft_us: int
    ttft_all_us: int
    ttft_none_us: int
    def __init__(self, take_chunks: _Optional[int] = ..., compute_window_us: _Optional[int] = ..., rate_bytes_per_s: _Optional[int] = ..., ttft_us: _Optional[int] = ..., ttft_all_us: _Optional[int] = ..., ttft_none_us: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lease", "delivery_id", "descriptor", "compute_window_us", "layers_in_stream", "transfer_ms", "first_layer_us", "priority")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_WINDOW_US_FIELD_NUMBER: _ClassVar[int]
    LAYERS_IN_STREAM_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_US_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    delivery_id: bytes
    descriptor: _common_pb2.Descriptor
    compute_window_us: int
    layers_in_stream: bool
    transfer_ms: int
    first_layer_us: int
    priority: int
    def __init__(self, lease: _Optional[bytes] = ..., delivery_id: _Optional[bytes] = ..., descriptor: _Optional[_Union[_common_pb2.Descriptor, _Mapping]] = ..., compute_window_us: _Optional[int] = ..., layers_in_stream: _Optional[bool] = ..., transfer_ms: _Optional[int] = ..., first_layer_us: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class RetrieveRequest(_message.Message):
    __slots__ = ("lookup", "delivery_id", "descriptor", "compute_window_us", "layers_in_stream", "transfer_ms", "first_layer_us", "priority", "follow_ms", "follow_part_ms")
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_WINDOW_US_FIELD_NUMBER: _ClassVar[int]
    LAYERS_IN_STREAM_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_US_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_MS_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_PART_MS_FIELD_NUMBER: _ClassVar[int]
    lookup: LookupRequest
    delivery_id: bytes
    descriptor: _common_pb2.Descriptor
    compute_window_us: int
    layers_in_stream: bool
    transfer_ms: int
    first_layer_us: int
    priority: int
    follow_ms: int
    follow_part_ms: int
    def __init__(self, lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., delivery_id: _Optional[bytes] = ..., descriptor: _Optional[_Union[_common_pb2.Descriptor, _Mapping]] = ..., compute_window_us: _Optional[int] = ..., layers_in_stream: _Optional[bool] = ..., transfer_ms: _Optional[int] = ..., first_layer_us: _Optional[int] = ..., priority: _Optional[int] = ..., follow_ms: _Optional[int] = ..., follow_part_ms: _Optional[int] = ...) -> None: ...

class RetrieveResponse(_message.Message):
    __slots__ = ("found", "delivery")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    found: LookupResponse
    delivery: FetchResponse
    def __init__(self, found: _Optional[_Union[LookupResponse, _Mapping]] = ..., delivery: _Optional[_Union[FetchResponse, _Mapping]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("layer", "node", "summary")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    layer: LayerArrived
    node: _common_pb2.NodeOutcome
    summary: FetchSummary
    def __init__(self, layer: _Optional[_Union[LayerArrived, _Mapping]] = ..., node: _Optional[_Union[_common_pb2.NodeOutcome, _Mapping]] = ..., summary: _Optional[_Union[FetchSummary, _Mapping]] = ...) -> None: ...

class LayerArrived(_message.Message):
    __slots__ = ("layer", "node_id")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    layer: int
    node_id: str
    def __init__(self, layer: _Optional[int] = ..., node_id: _Optional[str] = ...) -> None: ...

class FetchSummary(_message.Message):
    __slots__ = ("delivered", "usable_chunks", "bytes")
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    USABLE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    delivered: bytes
    usable_chunks: int
    bytes: int
    def __init__(self, delivered: _Optional[bytes] = ..., usable_chunks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("namespace", "chunk_keys", "first_chunk", "store_id", "source", "durability", "on_existing", "source_complete", "unchained", "transfer_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    ON_EXISTING_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    UNCHAINED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    chunk_keys: bytes
    first_chunk: int
    store_id: bytes
    source: _common_pb2.RdmaTarget
    durability: _common_pb2.Durability
    on_existing: _common_pb2.OnExisting
    source_complete: bool
    unchained: bool
    transfer_ms: int
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., chunk_keys: _Optional[bytes] = ..., first_chunk: _Optional[int] = ..., store_id: _Optional[bytes] = ..., source: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., on_existing: _Optional[_Union[_common_pb2.OnExisting, str]] = ..., source_complete: _Optional[bool] = ..., unchained: _Optional[bool] = ..., transfer_ms: _Optional[int] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("placement", "node", "summary")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    placement: StorePlacement
    node: _common_pb2.NodeOutcome
    summary: StoreSummary
    def __init__(self, placement: _Optional[_Union[StorePlacement, _Mapping]] = ..., node: _Optional[_Union[_common_pb2.NodeOutcome, _Mapping]] = ..., summary: _Optional[_Union[StoreSummary, _Mapping]] = ...) -> None: ...

class StorePlacement(_message.Message):
    __slots__ = ("ranges", "known_chunks", "nodes")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChunkRange]
    known_chunks: int
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeAddress]
    def __init__(self, ranges: _Optional[_Iterable[_Union[_common_pb2.ChunkRange, _Mapping]]] = ..., known_chunks: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeAddress, _Mapping]]] = ...) -> None: ...

class StoreSummary(_message.Message):
    __slots__ = ("stored_chunks", "known_chunks", "bytes")
    STORED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    stored_chunks: int
    known_chunks: int
    bytes: int
    def __init__(self, stored_chunks: _Optional[int] = ..., known_chunks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    def __init__(self, lease: _Optional[bytes] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class RetainRequest(_message.Message):
    __slots__ = ("namespace", "chunk_keys", "ttl_ms", "holder")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    chunk_keys: bytes
    ttl_ms: int
    holder: str
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., chunk_keys: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., holder: _Optional[str] = ...) -> None: ...

class RetainResponse(_message.Message):
    __slots__ = ("chunks", "until_ms")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    until_ms: int
    def __init__(self, chunks: _Optional[int] = ..., until_ms: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace", "chunk_keys", "within_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    chunk_keys: bytes
    within_ms: int
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., chunk_keys: _Optional[bytes] = ..., within_ms: _Optional[int] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("matched_chunks", "chunks_in_memory")
    MATCHED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    matched_chunks: int
    chunks_in_memory: int
    def __init__(self, matched_chunks: _Optional[int] = ..., chunks_in_memory: _Optional[int] = ...) -> None: ...

class ProveAddressRequest(_message.Message):
    __slots__ = ("target", "challenge", "nonce")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    target: _common_pb2.RdmaTarget
    challenge: bytes
    nonce: bytes
    def __init__(self, target: _Optional[_Union[_common_pb2.RdmaTarget, _Mapping]] = ..., challenge: _Optional[bytes] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ProveAddressResponse(_message.Message):
    __slots__ = ("challenge", "proof", "good_ms")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    GOOD_MS_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    proof: bytes
    good_ms: int
    def __init__(self, challenge: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., good_ms: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("namespace", "chunk_keys", "keep_chunks")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    KEEP_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    chunk_keys: bytes
    keep_chunks: int
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., chunk_keys: _Optional[bytes] = ..., keep_chunks: _Optional[int] = ...) -> None: ...

class DemoteRequest(_message.Message):
    __slots__ = ("namespace", "chunk_keys", "keep_chunks")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    KEEP_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    chunk_keys: bytes
    keep_chunks: int
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., chunk_keys: _Optional[bytes] = ..., keep_chunks: _Optional[int] = ...) -> None: ...

class DemoteResponse(_message.Message):
    __slots__ = ("demoted_chunks",)
    DEMOTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    demoted_chunks: int
    def __init__(self, demoted_chunks: _Optional[int] = ...) -> None: ...

class AssignRequest(_message.Message):
    __slots__ = ("namespace", "chunk_keys", "prompt_tokens", "engines", "hosts", "cached_tokens", "queued_tokens", "tokens_per_s")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.Namespace
    chunk_keys: bytes
    prompt_tokens: int
    engines: _containers.RepeatedScalarFieldContainer[str]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    queued_tokens: _containers.RepeatedScalarFieldContainer[int]
    tokens_per_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., chunk_keys: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., engines: _Optional[_Iterable[str]] = ..., hosts: _Optional[_Iterable[str]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., queued_tokens: _Optional[_Iterable[int]] = ..., tokens_per_s: _Optional[_Iterable[float]] = ...) -> None: ...

class AssignResponse(_message.Message):
    __slots__ = ("engine", "take_chunks", "ttft_us")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TAKE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    engine: str
    take_chunks: int
    ttft_us: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, engine: _Optional[str] = ..., take_chunks: _Optional[int] = ..., ttft_us: _Optional[_Iterable[int]] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("evicted_chunks",)
    EVICTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    evicted_chunks: int
    def __init__(self, evicted_chunks: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("with_away",)
    WITH_AWAY_FIELD_NUMBER: _ClassVar[int]
    with_away: bool
    def __init__(self, with_away: _Optional[bool] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("nodes", "checks", "checked")
    NODES_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.Node]
    checks: _containers.RepeatedCompositeFieldContainer[_common_pb2.HealthCheck]
    checked: bool
    def __init__(self, nodes: _Optional[_Iterable[_Union[_common_pb2.Node, _Mapping]]] = ..., checks: _Optional[_Iterable[_Union[_common_pb2.HealthCheck, _Mapping]]] = ..., checked: _Optional[bool] = ...) -> None: ...
