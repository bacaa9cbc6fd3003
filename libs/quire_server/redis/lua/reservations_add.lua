-- KEYS: the tenant's reservations, by number: "ends:bytes"; and the last number. ARGV: 1 bytes; 2 milliseconds that a
-- reservation lasts. Returns the new one's number, and the bytes of all before it.
local now, sum = now_ms(), 0
local all = redis.call('HGETALL', KEYS[1])
for at = 1, #all, 2 do
    local ends, size = string.match(all[at + 1], '(%d+):(%d+)')
    if ends and tonumber(ends) <= now then
        redis.call('HDEL', KEYS[1], all[at])
    elseif ends then
        sum = sum + tonumber(size)
    end
end
local number = redis.call('HINCRBY', KEYS[1], 'next', 1)
redis.call('HSET', KEYS[1], number, string.format('%d:%d', now + ARGV[2], ARGV[1]))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {number, sum}
