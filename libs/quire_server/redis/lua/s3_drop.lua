-- KEYS: objects, uploads, about, garbage, charged, waste, stored, versions, settings, sequence, parts of each upload. ARGV: 1 how many uploads the
-- caller knows of, 2 when their parts' blobs may be removed. Removes a bucket without objects, and its unfinished
-- uploads: 1, 0 if it has objects or versions, -1 if it has other uploads by now.
if redis.call('HLEN', KEYS[1]) > 0 or redis.call('HLEN', KEYS[8]) > 0 then return 0 end
if redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[1]) then return -1 end
for at = 11, #KEYS do
    local parts = redis.call('HGETALL', KEYS[at])
    for each = 1, #parts, 2 do discard(KEYS[4], KEYS[6], parts[each + 1], tonumber(ARGV[2])) end
    redis.call('DEL', KEYS[at])
end
redis.call('DEL', KEYS[2], KEYS[3], KEYS[5], KEYS[6], KEYS[7], KEYS[9], KEYS[10])
return 1
