-- KEYS: uploads, parts, garbage, objects, charged, waste. ARGV: 1 upload, 2 when its parts' blobs may be removed.
-- Whether it was there.
local parts = redis.call('HGETALL', KEYS[2])
count(KEYS[5], KEYS[4], -ENTRY * (redis.call('HEXISTS', KEYS[1], ARGV[1]) + #parts / 2))
for at = 1, #parts, 2 do discard(KEYS[3], KEYS[6], parts[at + 1], tonumber(ARGV[2])) end
redis.call('DEL', KEYS[2])
return redis.call('HDEL', KEYS[1], ARGV[1])
