"""The configuration class of each service, by its package."""

from __future__ import annotations

CONFIGS = {
    "quire_orchestrator": "OrchestratorConfig",
    "quire_gateway": "GatewayConfig",
    "quire_storage": "StorageConfig",
    "quire_scheduler": "SchedulerConfig",
    "quire_decoder": "DecoderConfig",
}
