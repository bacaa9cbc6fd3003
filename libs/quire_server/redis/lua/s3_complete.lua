-- KEYS: objects, keys, garbage, about, uploads, parts, completed, charged, waste. ARGV: 1 key, 2 packed, 3 expected, 4
-- when old blobs may be removed, 5 upload, 6 for how many ms it is remembered, then number and packed of each part that
-- the object is made of. Returns as s3_put, -3 for no such upload, -4 if a part is another now.
if redis.call('EXISTS', KEYS[4]) == 0 then return -1 end
if redis.call('HEXISTS', KEYS[5], ARGV[5]) == 0 then return -3 end
if not fits(KEYS[1], ARGV[1], ARGV[3]) then return 0 end
local chosen = {}
for at = 7, #ARGV, 2 do
    if redis.call('HGET', KEYS[6], ARGV[at]) ~= ARGV[at + 1] then return -4 end
    chosen[ARGV[at]] = true
end
count(KEYS[8], KEYS[1], 0)
store(KEYS[1], KEYS[2], KEYS[3], KEYS[9], KEYS[8], ARGV[1], ARGV[2], tonumber(ARGV[4]))
local parts, more = redis.call('HGETALL', KEYS[6]), -ENTRY
for at = 1, #parts, 2 do
    more = more - ENTRY
    if chosen[parts[at]] then
        more = more - size_of(parts[at + 1])
    else
        discard(KEYS[3], KEYS[9], parts[at + 1], tonumber(ARGV[4]))
    end
end
count(KEYS[8], KEYS[1], more)
redis.call('DEL', KEYS[6])
redis.call('HDEL', KEYS[5], ARGV[5])
redis.call('SET', KEYS[7], etag_of(ARGV[2]) .. '\n' .. ARGV[1], 'PX', ARGV[6])
return 1
