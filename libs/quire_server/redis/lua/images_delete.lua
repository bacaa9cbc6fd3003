-- KEYS: entries, ids, expires, stored. ARGV: 1 id, 2 the entry that is meant (empty: any), 3 tenant and id, 4 tenant.
-- Returns the entry, or false.
local before = redis.call('HGET', KEYS[1], ARGV[1])
if not before or (ARGV[2] ~= '' and before ~= ARGV[2]) then return false end
count(KEYS[4], ARGV[4], KEYS[1], -size_of(before))
redis.call('ZREM', KEYS[3], ARGV[3])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return before
