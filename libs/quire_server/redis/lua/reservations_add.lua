-- KEYS: the tenant's reservations, by name: "ends:bytes:number"; and the last number. ARGV: 1 name, 2 bytes, 3 ms that a
-- reservation lasts. Returns the new one's number, and the bytes of all before it.
local now, sum = now_ms(), 0
local all = redis.call('HGETALL', KEYS[1])
for at = 1, #all, 2 do
    local ends, size = string.match(all[at + 1], '(%d+):(%d+):')
    if ends and tonumber(ends) <= now then
        redis.call('HDEL', KEYS[1], all[at])
    elseif ends then
        sum = sum + tonumber(size)
    end
end
local number = redis.call('HINCRBY', KEYS[1], 'next', 1)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d:%d:%d', now + ARGV[3], ARGV[2], number))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {number, sum}
