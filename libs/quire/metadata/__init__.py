"""What Quire keeps in Redis: the prefix-closed index, pins of leases, membership, leaders. Nobody else sees `redis`."""

from quire.metadata.access import AccessKeys
from quire.metadata.buckets import Buckets
from quire.metadata.connection import connect
from quire.metadata.images import Images
from quire.metadata.index import ChunkRecord, Match, PlacedRun, PrefixIndex
from quire.metadata.leader import RedisLeaderLease
from quire.metadata.membership import Membership
from quire.metadata.policies import Policies

__all__ = [
    "AccessKeys",
    "Buckets",
    "ChunkRecord",
    "Images",
    "Match",
    "Membership",
    "PlacedRun",
    "Policies",
    "PrefixIndex",
    "RedisLeaderLease",
    "connect",
]
