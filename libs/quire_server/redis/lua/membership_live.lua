-- KEYS: members, expiries, bytes used, states of storage nodes; of all at one moment, and what time it is.
local function all(key) return redis.call('HGETALL', key) end
return {all(KEYS[1]), all(KEYS[2]), all(KEYS[3]), all(KEYS[4]), redis.call('TIME')}
