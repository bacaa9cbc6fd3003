"""Shared parts of Quire's services: start and stop, configuration, telemetry, Redis, object stores, certificates."""
