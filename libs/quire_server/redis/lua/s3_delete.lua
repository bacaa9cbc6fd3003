-- KEYS: objects, keys, garbage, charged, waste. ARGV: 1 key, 2 when its blobs may be removed, 3 "" or the etag it must
-- have. Returns 1, 0 if there is none, -1 for another etag.
local before = redis.call('HGET', KEYS[1], ARGV[1])
if not before then return 0 end
if ARGV[3] ~= '' and etag_of(before) ~= ARGV[3] then return -1 end
count(KEYS[4], KEYS[1], -ENTRY)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
discard(KEYS[3], KEYS[5], before, tonumber(ARGV[2]))
return 1
