-- KEYS: about, garbage. ARGV: 1 blob, 2 when it may be removed. Whether the bucket is there.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
return 1
