"""The orchestrator: prefix look-up, placement, leases, membership."""
