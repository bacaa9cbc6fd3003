"""What Quire's services share: their life, configuration, telemetry, Redis, object stores, certificates."""
