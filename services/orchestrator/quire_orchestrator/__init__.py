"""The brain: prefix look-up, placement, leases, membership."""
