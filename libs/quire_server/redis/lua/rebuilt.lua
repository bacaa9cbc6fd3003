-- KEYS: the rebuilding that is wanted, the last one that is done. ARGV: 1 a rebuilding. It is done.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
