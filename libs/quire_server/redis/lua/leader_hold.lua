-- KEYS: lease, who took it last. ARGV: 1 name, 2 ttl ms. Takes or keeps the lease unless another has it; returns who
-- has it, and who took it last before that.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return {holder, holder} end
local last = redis.call('GET', KEYS[2]) or ''
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if last ~= ARGV[1] then redis.call('SET', KEYS[2], ARGV[1]) end
return {ARGV[1], last}
