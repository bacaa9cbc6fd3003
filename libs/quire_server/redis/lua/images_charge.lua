-- KEYS: entries, charged. ARGV: 1 tenant. Returns the charge, counted if it was not.
count(KEYS[2], ARGV[1], KEYS[1], 0) return redis.call('HGET', KEYS[2], ARGV[1])
