-- KEYS: uses, unused. ARGV: 1 record's name. One use less; how many are left.
local left = redis.call('HINCRBY', KEYS[1], ARGV[1], -1)
if left <= 0 then
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('SADD', KEYS[2], ARGV[1])
end
return left
