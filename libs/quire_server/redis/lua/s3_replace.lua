-- KEYS: objects, versions. ARGV: 1 key, 2 version, 3 packed as it was, 4 packed as it is to be, of the same blobs.
-- Returns whether it was so.
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[3] then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[4])
    return 1
end
local field = ARGV[1] .. '\0' .. ARGV[2]
if redis.call('HGET', KEYS[2], field) ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[2], field, ARGV[4])
return 1
