-- KEYS: a bucket's running stores. ARGV: fingerprint of the first chunk of a range, the store that took it.
local field = redis.call('HGET', KEYS[1], ARGV[1])
if field and string.sub(field, 1, 16) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
