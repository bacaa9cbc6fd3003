-- KEYS: garbage, waste, charged. ARGV: blobs that were removed.
local size = 0
for _, blob in ipairs(ARGV) do
    size = size + (tonumber(redis.call('HGET', KEYS[2], blob)) or 0)
    redis.call('HDEL', KEYS[2], blob)
    redis.call('ZREM', KEYS[1], blob)
end
if size > 0 and redis.call('EXISTS', KEYS[3]) == 1 then redis.call('DECRBY', KEYS[3], string.format('%.0f', size)) end
