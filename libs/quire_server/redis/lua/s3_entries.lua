-- Entries and parts are "etag\nblob blob ...\nCBOR", so that scripts see the ETag and the blobs; the CBOR is a list that
-- begins with the size. `charged` counts a bucket's objects, parts and uploads, and blobs that nothing refers to until
-- they are removed: their sizes are in the hash `waste`. Releases before 0.3 counted otherwise, in `stored`.
local function size_of(raw) return uint(raw, select(2, string.find(raw, '^[^\n]*\n[^\n]*\n')) + 2) end
local function sum_of(hash, part)
    local cursor, sum = '0', 0
    repeat
        local page = redis.call('HSCAN', hash, cursor, 'COUNT', 1000)
        cursor = page[1]
        for at = 1, #page[2], 2 do sum = sum + part(page[2][at], page[2][at + 1]) end
    until cursor == '0'
    return sum
end
local function count(charged, objects, more)
    if redis.call('EXISTS', charged) == 0 then
        local bucket = string.sub(objects, 1, -1 - #'objects') -- the other keys are in its slot
        local function entry(_, raw) return ENTRY + size_of(raw) end
        local function unremoved(blob, size) -- releases before 0.3 remove blobs without their waste
            return redis.call('ZSCORE', bucket .. 'garbage', blob) and tonumber(size) or 0
        end
        local sum = sum_of(objects, entry) + sum_of(bucket .. 'versions', entry)
            + sum_of(bucket .. 'waste', unremoved)
            + sum_of(bucket .. 'uploads', function(id) return ENTRY + sum_of(bucket .. 'parts:' .. id, entry) end)
        redis.call('SET', charged, string.format('%.0f', sum))
    end
    if more ~= 0 then redis.call('INCRBY', charged, string.format('%.0f', more)) end -- Lua prints -0 as "-0"
end
local function etag_of(raw) return string.match(raw, '^[^\n ]*') end
local function discard(garbage, waste, raw, at)
    local names, size = string.match(raw, '^[^\n]*\n([^\n]*)'), size_of(raw)
    local count = select(2, string.gsub(names, '%S+', ''))
    for blob in string.gmatch(names, '%S+') do
        redis.call('ZADD', garbage, at + 10000 * count, blob)
        if size > 0 then redis.call('HSET', waste, blob, string.format('%.0f', size)) end
        size = 0 -- the first blob stands for all
    end
end
local function store(objects, keys, garbage, waste, charged, key, packed, grace)
    local before = redis.call('HGET', objects, key)
    count(charged, objects, size_of(packed) + (before and 0 or ENTRY))
    redis.call('HSET', objects, key, packed)
    redis.call('ZADD', keys, 0, key)
    if before then discard(garbage, waste, before, grace) end
end
local function fits(objects, key, expected)
    local before = redis.call('HGET', objects, key)
    if expected == 'absent' then return not before end
    return expected == '' or (before and etag_of(before) == expected)
end
