-- KEYS: the tenant's retentions. ARGV: pairs of a tip and its known value.
for at = 1, #ARGV, 2 do
    if redis.call('HGET', KEYS[1], ARGV[at]) == ARGV[at + 1] then redis.call('HDEL', KEYS[1], ARGV[at]) end
end
