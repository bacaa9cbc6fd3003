-- KEYS: see bucket_of. ARGV: 1 key, 2 packed, 3 "" | "absent" | etag that must be there, 4 when the old blobs may be
-- removed, 5 the new blobs, separated by ' ', 6 random end of a version id. Returns 1 and the version's id; 0 for another
-- etag, -1 for no such bucket, -2 if a blob was removed concurrently.
local b = bucket_of(KEYS)
if redis.call('EXISTS', b.about) == 0 then return {-1, ''} end
if not fits(b.objects, ARGV[1], ARGV[3]) then return {0, ''} end
for blob in string.gmatch(ARGV[5], '%S+') do
    if not redis.call('ZSCORE', b.garbage, blob) then return {-2, ''} end
end
local id = write(b, ARGV[1], ARGV[2], tonumber(ARGV[4]), ARGV[6])
for blob in string.gmatch(ARGV[5], '%S+') do redis.call('ZREM', b.garbage, blob) end
return {1, id}
