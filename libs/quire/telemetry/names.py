"""Every span and metric name of Quire. A tidy test holds that no other module spells one."""

from __future__ import annotations

from typing import Final, NamedTuple

# Spans, by service. RPC spans are named "package.Service/Method" by `quire.wire.channels`.
CLIENT_LOOKUP: Final = "quire.client.lookup"
CLIENT_FETCH: Final = "quire.client.fetch"
CLIENT_STORE: Final = "quire.client.store"
INDEX_MATCH: Final = "quire.index.match"
INDEX_REGISTER: Final = "quire.index.register"
CATALOGUE_READ: Final = "quire.catalogue.read"
STORAGE_HOLD: Final = "quire.storage.hold"
STORAGE_DELIVER: Final = "quire.storage.deliver"
STORAGE_READ: Final = "quire.storage.read"
STORAGE_OBJECT_READ: Final = "quire.storage.object.read"
STORAGE_LAYER: Final = "quire.storage.layer"
STORAGE_DRAIN: Final = "quire.storage.drain"
STORAGE_QUIESCE: Final = "quire.storage.quiesce"
STORAGE_ADMIT: Final = "quire.storage.admit"
STORAGE_INGEST: Final = "quire.storage.ingest"
STORAGE_PULL: Final = "quire.storage.pull"
STORAGE_COMMIT: Final = "quire.storage.commit"
GATEWAY_IMAGE: Final = "quire.gateway.image"
GATEWAY_HTTP: Final = "quire.gateway.http"
GATEWAY_S3: Final = "quire.gateway.s3"
GATEWAY_LATENT: Final = "quire.gateway.latent"
DECODER_SERVE: Final = "quire.decoder.serve"
DECODER_STAGES: Final = "quire.decoder.stage."
CLIENT_IMAGE: Final = "quire.client.image"
ROUTER_REQUEST: Final = "quire.router.request"
EVENT_LAYER: Final = "layer"
EVENT_AGAIN: Final = "asked again"

# Metrics; units as UCUM in the instrument. Durations of requests are named by the semantic conventions.
RPC_DURATION: Final = "rpc.server.call.duration"
HTTP_DURATION: Final = "http.server.request.duration"
RPC_REQUESTS: Final = "quire.rpc.requests"
HTTP_REQUESTS: Final = "quire.http.requests"
BUILD_INFO: Final = "quire.build.info"
CERTIFICATE_EXPIRY: Final = "quire.certificate.expiry"
REDIS_ROUND_TRIP: Final = "quire.redis.round_trip"
REDIS_MEMORY: Final = "quire.redis.memory"
REDIS_FULLNESS: Final = "quire.redis.fullness"
REDIS_FAILURES: Final = "quire.redis.failures"
LEADER_CHANGES: Final = "quire.scheduler.leader.changes"
REFUSED_MEMBER: Final = "quire.member.refused"
LOOP_LAG: Final = "quire.loop.lag"
LAG_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LOOKUP_SECONDS: Final = "quire.lookup"
INDEX_CHUNKS: Final = "quire.index.chunks"
INDEX_LEASES: Final = "quire.index.leases"
SHED_REQUESTS: Final = "quire.gateway.shed"
STALL_SECONDS: Final = "quire.storage.stall"
PACING: Final = "quire.storage.pacing"
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
DELIVERED_BYTES: Final = "quire.storage.delivered"
INGESTED_BYTES: Final = "quire.storage.ingested"
CHECKSUM_FAILURES: Final = "quire.storage.checksum.failures"
SCHEDULER_FALLBACKS: Final = "quire.storage.scheduler.fallbacks"
DRIVE_ERRORS: Final = "quire.storage.drive.errors"
TIER_HITS: Final = "quire.storage.tier.hits"
EVICTIONS: Final = "quire.storage.evictions"
OBJECT_READS: Final = "quire.storage.object.reads"
REPAIRS: Final = "quire.storage.repairs"
HOT_COPIES: Final = "quire.storage.hot_copies"
REPLICATED_BYTES: Final = "quire.storage.replicated"
OBJECT_LAG_BYTES: Final = "quire.storage.object.lag"
ROUTER_CHOICES: Final = "quire.router.choices"
ROUTER_RETRIES: Final = "quire.router.retries"
ROUTER_HANDOVERS: Final = "quire.router.handovers"
ROUTER_FIRST_TOKEN: Final = "quire.router.first_token"
ROUTER_ENGINES: Final = "quire.router.engines"


class Stat(NamedTuple):
    """One of a node's stats (`*` stands for what becomes the label) and the instrument that publishes it."""

    name: str
    metric: str
    unit: str = "1"
    counts: bool = False
    label: str = ""
    scale: float = 1.0
    doc: str = ""


STATS: Final = (
    Stat("capacity", "quire.node.capacity", "By", doc="what the node may hold"),
    Stat("used", "quire.node.used", "By", doc="what the node holds"),
    Stat("nodes.*", "quire.cluster.nodes", label="role", doc="live members"),
    Stat("health", "quire.cluster.health", doc="verdict on the cluster: 0 OK, 1 WARN, 2 ERR (`quire health`)"),
    Stat("failed.*", "quire.cluster.failed_checks", label="code", doc="how often each check of the cluster fails"),
    Stat("leases", "quire.index.leased", doc="leases on chunks that were neither given back nor ran out"),
    Stat("sessions", "quire.gateway.sessions", doc="clients' sessions that are open, or kept for their return"),
    Stat("transfers", "quire.gateway.transfers", doc="deliveries and stores that run"),
    Stat("tenant.*.requests", "quire.gateway.tenant.requests", label="tenant", doc="requests that run"),
    Stat("tenant.*.bytes", "quire.gateway.tenant.bytes", "By", label="tenant", doc="bytes in flight"),
    Stat("chunks", "quire.storage.chunks", doc="chunks held"),
    Stat("memory MiB", "quire.storage.memory", "By", scale=2**20, doc="of the arena that is used"),
    Stat("disk MiB", "quire.storage.disk", "By", scale=2**20, doc="of the pool that is used"),
    Stat("dirty", "quire.storage.dirty", doc="chunks in memory alone"),
    Stat("to copy", "quire.storage.to_copy", doc="chunks that a node to be removed has, and too few nodes that stay"),
    Stat("failed drives", "quire.storage.failed_drives", doc="drives that are not used any more, after errors"),
    Stat("alone", "quire.storage.alone", doc="replicated chunks without a second live copy, or not looked at yet"),
    Stat("deliveries", "quire.deliveries", doc="deliveries that run (storage) or are admitted (scheduler)"),
    Stat("ingests", "quire.storage.ingests", doc="stores that run"),
    Stat("rate.granted", "quire.storage.granted", "By/s", doc="sum of the rates of deliveries"),
    Stat("rate.advanced", "quire.storage.advanced", "By", doc="that deliveries might send before they had a rate"),
    Stat("rate.fallback", "quire.storage.fallback", doc="1 while no scheduler answers"),
    Stat("scrubbed", "quire.storage.scrubbed", counts=True, doc="chunks that were read to check them"),
    Stat("link.*.budget", "quire.link.budget", "By/s", label="link", doc="what a link may carry"),
    Stat("link.*.granted", "quire.link.granted", "By/s", label="link", doc="what of it is given away, this epoch"),
    Stat("link.*.newcomer", "quire.link.newcomer", "By/s", label="link", doc="what another delivery would get"),
    Stat("leads", "quire.scheduler.leads", doc="1 for the scheduler that decides"),
    Stat("requests", "quire.decoder.requests", counts=True, doc="images asked for"),
    Stat("hits.*", "quire.decoder.hits", counts=True, label="form", doc="images found in the cache, by their form"),
    Stat("misses", "quire.decoder.misses", counts=True, doc="images whose latent had to be fetched"),
    Stat("queue", "quire.decoder.queue", doc="latents that wait for the devices or are being decoded"),
    Stat("devices", "quire.decoder.devices", doc="devices that decode"),
    Stat("batches", "quire.decoder.batches", counts=True, doc="batches decoded"),
    Stat("cache.bytes", "quire.decoder.cache", "By", doc="what the cache holds"),
    Stat("cache.rendition_bytes", "quire.decoder.cache.renditions", "By", doc="what it holds as renditions"),
    Stat("cache.image_bytes", "quire.decoder.cache.images", "By", doc="what it holds as lossless images"),
    Stat("cache.latent_bytes", "quire.decoder.cache.latents", "By", doc="what it holds as latents"),
    Stat("decode_ms", "quire.decoder.decode", "s", scale=1e-3, doc="mean time of a decode, as the cache takes it"),
    Stat("fetch_ms", "quire.decoder.fetch", "s", scale=1e-3, doc="mean time of a fetch, as the cache takes it"),
    Stat("encode_ms", "quire.decoder.encode", "s", scale=1e-3, doc="mean time of encoding, as the cache takes it"),
)
