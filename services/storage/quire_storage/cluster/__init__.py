"""Duties of a node in its cluster: registration, replication, repair, verification, and calls of members."""
