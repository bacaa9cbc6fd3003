"""The whole cluster on one machine: every service its own process, a real redis-server, nothing to install."""

from quire_tools.local.cluster import LocalCluster, read_state

__all__ = ["LocalCluster", "read_state"]
