"""Tiers of a node: arena (memory), pool (drives) and object tier, and what carries out `core.residency`."""
