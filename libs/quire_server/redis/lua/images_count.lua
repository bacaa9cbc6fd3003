-- An entry is a list of CBOR that begins with the record's digest and length. A hash by tenant has the sums of the
-- lengths, and of the entries themselves; earlier releases did not keep it.
local function size_of(packed) return uint(packed, 36) + ENTRY end
local function count(stored, tenant, entries, more)
    if redis.call('HEXISTS', stored, tenant) == 0 then
        local cursor, sum = '0', 0
        repeat
            local page = redis.call('HSCAN', entries, cursor, 'COUNT', 1000)
            cursor = page[1]
            for at = 2, #page[2], 2 do sum = sum + size_of(page[2][at]) end
        until cursor == '0'
        redis.call('HSET', stored, tenant, string.format('%.0f', sum))
    end
    if more ~= 0 then redis.call('HINCRBY', stored, tenant, string.format('%.0f', more)) end -- Lua prints -0 as "-0"
end
