-- KEYS: states of storage nodes. ARGV: 1 node, 2 state, 3 channel, 4 the state that it is in. Returns 0 if it is in
-- another one, or not expected.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[4] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
