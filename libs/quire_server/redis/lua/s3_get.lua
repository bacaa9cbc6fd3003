-- KEYS: objects, versions, archive. ARGV: 1 key, 2 version, "" for the newest. Returns the packed entry, which may be a
-- delete marker; false for none.
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if raw and (ARGV[2] == '' or id_of(raw) == ARGV[2]) then return raw end
local id = ARGV[2]
if id == '' then
    local first = redis.call('ZRANGEBYLEX', KEYS[3], '[' .. ARGV[1] .. '\0', '(' .. ARGV[1] .. '\1', 'LIMIT', 0, 1)[1]
    if not first then return false end
    id = string.sub(first, #ARGV[1] + #OLDEST + 3)
end
return redis.call('HGET', KEYS[2], ARGV[1] .. '\0' .. id)
