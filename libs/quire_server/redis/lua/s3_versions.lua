-- Versions. Behind the ETag of an object that was written with versioning stand its order and its id: "etag ORDER ID".
-- Newer ones have a lower order, and ids but "null" begin with theirs. `objects` has the current versions. `versions` has
-- the others, and all delete markers (which have no ETag), under "key\0ID"; the sorted set `archive` has "key\0ORDER ID".
local NULL, OLDEST = 'null', 'fffffffffffff'
local function bucket_of(keys)
    local b = {}
    for at, name in ipairs({'objects', 'keys', 'garbage', 'about', 'charged', 'waste', 'settings', 'versions', 'archive',
        'sequence'}) do b[name] = keys[at] end
    return b
end
local function place_of(raw) return string.match(raw, '^[^\n ]* ([^\n]*)\n') or (OLDEST .. ' ' .. NULL) end
local function id_of(raw) return string.sub(place_of(raw), #OLDEST + 2) end
local function is_marker(raw) return string.find(raw, '^[ \n]') ~= nil end
local function placed(raw, order, id)
    local line = string.find(raw, '\n', 1, true)
    return string.sub(raw, 1, line - 1) .. ' ' .. order .. ' ' .. id .. string.sub(raw, line)
end
local function is_changed(raw, packed) -- `packed`: "" for anything, or an entry as it was read, without its place
    return packed ~= '' and string.gsub(raw, '^([^\n ]*)[^\n]*', '%1', 1) ~= packed
end
local function versioning_of(b) return redis.call('HGET', b.settings, 'versioning') or '' end
local function next_order(b) return string.format('%013x', 2 ^ 52 - 1 - redis.call('INCR', b.sequence)) end
local function add(b, key, raw)
    redis.call('HSET', b.versions, key .. '\0' .. id_of(raw), raw)
    redis.call('ZADD', b.archive, 0, key .. '\0' .. place_of(raw))
end
local function take(b, key, raw)
    redis.call('HDEL', b.versions, key .. '\0' .. id_of(raw))
    redis.call('ZREM', b.archive, key .. '\0' .. place_of(raw))
end
local function end_of(b, raw, grace)
    count(b.charged, b.objects, -ENTRY)
    discard(b.garbage, b.waste, raw, grace)
end
local function current(b, key) return redis.call('HGET', b.objects, key) end
-- Make room for a new version: what is current stays as an older one, and a new version "null" replaces another.
local function step_back(b, key, state, grace)
    local before = current(b, key)
    if before then
        redis.call('HDEL', b.objects, key)
        redis.call('ZREM', b.keys, key)
        if state == 'Suspended' and id_of(before) == NULL then end_of(b, before, grace) else add(b, key, before) end
    end
    local null = state == 'Suspended' and redis.call('HGET', b.versions, key .. '\0' .. NULL)
    if null then take(b, key, null) end_of(b, null, grace) end
end
-- Store a version, the newest from now on; returns its id, "" for "null".
local function write(b, key, packed, grace, random)
    local state, id = versioning_of(b), NULL
    count(b.charged, b.objects, 0) -- where nothing was counted yet, while all is there
    if state ~= '' then
        step_back(b, key, state, grace)
        local order = next_order(b)
        if state == 'Enabled' then id = order .. random end
        packed = placed(packed, order, id)
    end
    store(b.objects, b.keys, b.garbage, b.waste, b.charged, key, packed, grace)
    return id ~= NULL and id or ''
end
-- Where the newest version is no current one, and no delete marker, it becomes the current one.
local function promote(b, key)
    if current(b, key) then return end
    local first = redis.call('ZRANGEBYLEX', b.archive, '[' .. key .. '\0', '(' .. key .. '\1', 'LIMIT', 0, 1)[1]
    local raw = first and redis.call('HGET', b.versions, key .. '\0' .. string.sub(first, #key + #OLDEST + 3))
    if not raw or is_marker(raw) then return end
    take(b, key, raw)
    redis.call('HSET', b.objects, key, raw)
    redis.call('ZADD', b.keys, 0, key)
end
