-- KEYS: the tenant's retentions, by the last chunk's key (its tip): "until:bytes". ARGV: 1 the tip, 2 bytes, 3 until,
-- 4 now, 5 limit, 6 most retentions, then tips within the prefix. Returns the bytes that are retained with it, or would
-- be if that is above the limit, and the shorter retentions that it replaces: they are not counted here, and remain
-- until they are unpinned.
local key, tip, bytes, untl, now = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local inside, inner, sum, count, latest = {}, {}, bytes, 1, untl
for at = 7, #ARGV do inside[ARGV[at]] = true end
local all = redis.call('HGETALL', key)
for at = 1, #all, 2 do
    local other, ends, size = all[at], string.match(all[at + 1], '(%d+):(%d+)')
    ends = tonumber(ends)
    if ends <= now then
        redis.call('HDEL', key, other)
    elseif other ~= tip then
        latest = math.max(latest, ends)
        if inside[other] and ends <= untl then
            inner[#inner + 1] = other
            inner[#inner + 1] = all[at + 1]
        else
            sum, count = sum + tonumber(size), count + 1
        end
    end
end
local limit = tonumber(ARGV[5])
if count > tonumber(ARGV[6]) then return {math.max(sum, limit + 1), {}} end
if sum > limit then return {sum, {}} end
redis.call('HSET', key, tip, string.format('%d:%d', untl, bytes))
redis.call('PEXPIRE', key, latest - now)
return {sum, inner}
