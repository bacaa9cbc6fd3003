-- KEYS: see bucket_of. ARGV: 1 key, 2 version, 3 when its blobs may be removed, 4 "" or the version as it must be, 5
-- whether it must not be the current one. Returns 1, 0 for no such version, -1 if it is another, and whether it was a delete marker. The newest that is left becomes the
-- current one.
local b = bucket_of(KEYS)
local key, id, raw = ARGV[1], ARGV[2], current(b, ARGV[1])
local is_current = raw and id_of(raw) == id
if not is_current then raw = redis.call('HGET', b.versions, key .. '\0' .. id) end
if not raw then return {0, 0} end
if is_changed(raw, ARGV[4]) or (is_current and ARGV[5] == '1') then return {-1, 0} end
count(b.charged, b.objects, 0) -- where nothing was counted yet, while all is there
if is_current then
    redis.call('HDEL', b.objects, key)
    redis.call('ZREM', b.keys, key)
else
    take(b, key, raw)
end
end_of(b, raw, tonumber(ARGV[3]))
promote(b, key)
return {1, is_marker(raw) and 1 or 0}
