-- KEYS: see bucket_of. ARGV: 1 key, 2 when its blobs may be removed, 3 "" or the etag it must have, 4 a packed delete
-- marker, 5 random end of a version id, 6 "" or the object as it must be. Returns 1 and the id of the delete marker, if versioning made one; 0 if there is
-- no object, -1 for another etag.
local b = bucket_of(KEYS)
local key, grace, before = ARGV[1], tonumber(ARGV[2]), current(b, ARGV[1])
if (ARGV[3] ~= '' or ARGV[6] ~= '') and not before then return {0, ''} end
if ARGV[3] ~= '' and etag_of(before) ~= ARGV[3] then return {-1, ''} end
if before and is_changed(before, ARGV[6]) then return {-1, ''} end
count(b.charged, b.objects, 0) -- where nothing was counted yet, while all is there
local state = versioning_of(b)
if state == '' then
    if not before then return {0, ''} end
    redis.call('HDEL', b.objects, key)
    redis.call('ZREM', b.keys, key)
    end_of(b, before, grace)
    return {1, ''}
end
step_back(b, key, state, grace)
local order = next_order(b)
local id = state == 'Enabled' and order .. ARGV[5] or NULL
count(b.charged, b.objects, ENTRY)
add(b, key, placed(ARGV[4], order, id))
return {1, id}
