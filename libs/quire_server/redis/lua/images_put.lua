-- KEYS: entries, ids, uses, unused, expires, stored. ARGV: 1 id, 2 entry, 3 record's name; of the one before: 4 "1" if
-- none must be there, 5 its record's digest ("" any), which a packed entry begins with; 6 tenant and id, 7 when it goes;
-- 8 tenant, 9 now. Returns the entry before, false if there was none, or 0 if that is not so: then the record is unused,
-- unless others have it. An entry whose time is over is none, though it is not swept yet.
local before = redis.call('HGET', KEYS[1], ARGV[1])
local ends = tonumber(redis.call('ZSCORE', KEYS[5], ARGV[6]) or 'inf')
local there = before and ends > tonumber(ARGV[9])
if (there and ARGV[4] == '1')
        or (ARGV[5] ~= '' and (not there or string.sub(before, 4, 35) ~= ARGV[5])) then
    if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 then redis.call('SADD', KEYS[4], ARGV[3]) end
    return 0
end
count(KEYS[6], ARGV[8], KEYS[1], size_of(ARGV[2]) - (before and size_of(before) or 0))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], 0, ARGV[1])
redis.call('HINCRBY', KEYS[3], ARGV[3], 1)
redis.call('SREM', KEYS[4], ARGV[3])
if tonumber(ARGV[7]) > 0 then
    redis.call('ZADD', KEYS[5], ARGV[7], ARGV[6])
else
    redis.call('ZREM', KEYS[5], ARGV[6])
end
return before
