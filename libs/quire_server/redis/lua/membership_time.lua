-- KEYS: members, so that a Cluster asks the Redis that keeps them.
return redis.call('TIME')
