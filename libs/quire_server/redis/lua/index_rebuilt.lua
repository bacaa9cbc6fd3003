-- KEYS: the requested rebuild, the last completed rebuild. ARGV: 1 a completed rebuild. Returns 0 if another one is requested.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
