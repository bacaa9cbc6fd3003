-- KEYS: objects, keys, garbage, about, charged, waste. ARGV: 1 key, 2 packed, 3 "" | "absent" | etag that must be there,
-- 4 when the old blobs may be removed, 5 the new blobs, separated by ' '. Returns 1, 0 for another etag, -1 for no such
-- bucket, -2 if a blob was removed concurrently.
if redis.call('EXISTS', KEYS[4]) == 0 then return -1 end
if not fits(KEYS[1], ARGV[1], ARGV[3]) then return 0 end
for blob in string.gmatch(ARGV[5], '%S+') do
    if not redis.call('ZSCORE', KEYS[3], blob) then return -2 end
end
store(KEYS[1], KEYS[2], KEYS[3], KEYS[6], KEYS[5], ARGV[1], ARGV[2], tonumber(ARGV[4]))
for blob in string.gmatch(ARGV[5], '%S+') do redis.call('ZREM', KEYS[3], blob) end
return 1
