-- KEYS: uploads, parts, garbage, objects, charged, waste. ARGV: 1 upload, 2 number, 3 packed, 4 when an old part's blobs
-- may be removed, 5 the new blobs. Returns 1, -3 if there is no such upload, -2 if a blob was removed concurrently.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return -3 end
for blob in string.gmatch(ARGV[5], '%S+') do
    if not redis.call('ZSCORE', KEYS[3], blob) then return -2 end
end
local before = redis.call('HGET', KEYS[2], ARGV[2])
count(KEYS[5], KEYS[4], size_of(ARGV[3]) + (before and 0 or ENTRY))
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
if before then discard(KEYS[3], KEYS[6], before, tonumber(ARGV[4])) end
for blob in string.gmatch(ARGV[5], '%S+') do redis.call('ZREM', KEYS[3], blob) end
return 1
