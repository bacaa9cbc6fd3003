"""Every span and metric name of Quire. A tidy test holds that no other module spells one."""

from __future__ import annotations

from typing import Final

# Spans, by service. RPC spans are named "package.Service/Method" by `quire.rpc`.
CLIENT_LOOKUP: Final = "quire.client.lookup"
CLIENT_FETCH: Final = "quire.client.fetch"
CLIENT_STORE: Final = "quire.client.store"
INDEX_MATCH: Final = "quire.index.match"
INDEX_REGISTER: Final = "quire.index.register"
STORAGE_DELIVER: Final = "quire.storage.deliver"
STORAGE_ADMIT: Final = "quire.storage.admit"
STORAGE_INGEST: Final = "quire.storage.ingest"
STORAGE_PULL: Final = "quire.storage.pull"
STORAGE_COMMIT: Final = "quire.storage.commit"
GATEWAY_IMAGE: Final = "quire.gateway.image"
GATEWAY_S3: Final = "quire.gateway.s3"
GATEWAY_LATENT: Final = "quire.gateway.latent"
DECODER_SERVE: Final = "quire.decoder.serve"
CLIENT_IMAGE: Final = "quire.client.image"
EVENT_LAYER: Final = "layer"

# Metrics; units as UCUM in the instrument.
DELIVERED_BYTES: Final = "quire.storage.delivered"
INGESTED_BYTES: Final = "quire.storage.ingested"
CHECKSUM_FAILURES: Final = "quire.storage.checksum.failures"
SCHEDULER_FALLBACKS: Final = "quire.storage.scheduler.fallbacks"
DRIVE_ERRORS: Final = "quire.storage.drive.errors"
TIER_HITS: Final = "quire.storage.tier.hits"
EVICTIONS: Final = "quire.storage.evictions"
REPAIRS: Final = "quire.storage.repairs"
REPLICATED_BYTES: Final = "quire.storage.replicated"
OBJECT_LAG_BYTES: Final = "quire.storage.object.lag"
