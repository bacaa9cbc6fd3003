"""Quire's data in Redis: the prefix-closed index, leases' pins, members, leaders. Nothing else imports `redis`."""

from quire_server.redis.capacity import RedisCapacity
from quire_server.redis.connection import connect
from quire_server.redis.decodes import RunningDecodes
from quire_server.redis.events import CacheEvents
from quire_server.redis.images import Images
from quire_server.redis.kept import StoredValue
from quire_server.redis.keys.access import AccessKeys
from quire_server.redis.keys.acts import Acts
from quire_server.redis.keys.key_secret import key_secret, until_open
from quire_server.redis.leader import RedisLeaderLease
from quire_server.redis.membership import Membership
from quire_server.redis.policies import StoredPolicies
from quire_server.redis.prefix_index.index import PrefixIndex
from quire_server.redis.probe import RedisProbe
from quire_server.redis.reservations import Reservations
from quire_server.redis.retained import RetainedBytes
from quire_server.redis.running_stores import RunningStores
from quire_server.redis.s3.buckets import S3Buckets

__all__ = [
    "AccessKeys",
    "Acts",
    "CacheEvents",
    "Images",
    "Membership",
    "PrefixIndex",
    "RedisCapacity",
    "RedisLeaderLease",
    "RedisProbe",
    "Reservations",
    "RetainedBytes",
    "RunningDecodes",
    "RunningStores",
    "S3Buckets",
    "StoredPolicies",
    "StoredValue",
    "connect",
    "key_secret",
    "until_open",
]
