-- KEYS: the tenant's retentions, "until:bytes" by the key of the last chunk (the tip, 32 bytes) and the holder's name.
-- ARGV: 1 tip and name, 2 bytes, 3 until, 4 now, 5 limit, 6 most retentions, 7 most holders of a prefix, then those of
-- the holder within the prefix. A prefix counts once, however many hold it. Returns the bytes that are retained with it,
-- or would be if that is above the limit, -1 where there are too many retentions or holders; and the holder's shorter
-- retentions that it replaces: they are not counted here, and remain until they are unpinned.
local key, field, bytes, untl, now = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local inside, inner, sizes, count, holders, latest = {}, {}, {}, 1, 1, untl
local own_tip = string.sub(field, 1, 32)
for at = 8, #ARGV do inside[ARGV[at]] = true end
sizes[own_tip] = bytes
local all = redis.call('HGETALL', key)
for at = 1, #all, 2 do
    local other, ends, size = all[at], string.match(all[at + 1], '(%d+):(%d+)')
    ends = tonumber(ends)
    if ends <= now then
        redis.call('HDEL', key, other)
    elseif other == field then
        untl = math.max(untl, ends)
    end
end
for at = 1, #all, 2 do
    local other, ends, size = all[at], string.match(all[at + 1], '(%d+):(%d+)')
    ends = tonumber(ends)
    if ends > now and other ~= field then
        latest = math.max(latest, ends)
        if inside[other] and ends <= untl then
            inner[#inner + 1] = other
            inner[#inner + 1] = all[at + 1]
        else
            local tip = string.sub(other, 1, 32)
            sizes[tip] = math.max(sizes[tip] or 0, tonumber(size))
            count = count + 1
            if tip == own_tip then holders = holders + 1 end
        end
    end
end
local sum = 0
for _, size in pairs(sizes) do sum = sum + size end
local limit = tonumber(ARGV[5])
if count > tonumber(ARGV[6]) or holders > tonumber(ARGV[7]) then return {-1, {}} end
if sum > limit then return {sum, {}} end
latest = math.max(latest, untl)
redis.call('HSET', key, field, string.format('%d:%d', untl, bytes))
redis.call('PEXPIRE', key, latest - now)
return {sum, inner}
