-- KEYS: see bucket_of, then uploads, parts, completed. ARGV: 1 key, 2 packed, 3 expected, 4 when old blobs may be
-- removed, 5 upload, 6 for how many ms it is remembered, 7 random end of a version id, then number and packed of each
-- part that the object is made of. Returns as s3_put, -3 for no such upload, -4 if a part is another now.
local b, uploads, of_parts, completed = bucket_of(KEYS), KEYS[11], KEYS[12], KEYS[13]
if redis.call('EXISTS', b.about) == 0 then return {-1, ''} end
if redis.call('HEXISTS', uploads, ARGV[5]) == 0 then return {-3, ''} end
if not fits(b.objects, ARGV[1], ARGV[3]) then return {0, ''} end
local chosen = {}
for at = 8, #ARGV, 2 do
    if redis.call('HGET', of_parts, ARGV[at]) ~= ARGV[at + 1] then return {-4, ''} end
    chosen[ARGV[at]] = true
end
count(b.charged, b.objects, 0)
local id = write(b, ARGV[1], ARGV[2], tonumber(ARGV[4]), ARGV[7])
local parts, more = redis.call('HGETALL', of_parts), -ENTRY
for at = 1, #parts, 2 do
    more = more - ENTRY
    if chosen[parts[at]] then
        more = more - size_of(parts[at + 1])
    else
        discard(b.garbage, b.waste, parts[at + 1], tonumber(ARGV[4]))
    end
end
count(b.charged, b.objects, more)
redis.call('DEL', of_parts)
redis.call('HDEL', uploads, ARGV[5])
redis.call('SET', completed, etag_of(ARGV[2]) .. '\n' .. ARGV[1], 'PX', ARGV[6])
return {1, id}
