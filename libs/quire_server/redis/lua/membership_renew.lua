-- KEYS: members, expiries, bytes used, figures, states of storage nodes. ARGV: 1 channel, then of each member: node,
-- incarnation, entry, time to live in ms, bytes used, figures, the state of a storage node that is new ("" for other
-- members). By the clock of Redis: those who write and those who read have clocks of their own. Returns for each its
-- state, or 0 if another incarnation that is alive has the name. One that joins or is alive again is made known on the
-- channel.
local now = now_ms()
local function renew(node, incarnation, packed, ttl, used, figures, state)
  local entry, expiry = redis.call('HGET', KEYS[1], node), redis.call('HGET', KEYS[2], node)
  local alive = entry and expiry and tonumber(expiry) > now
  local same = entry and string.find(entry, incarnation, 1, true)
  if alive and not same then return 0 end
  if not (alive and same) then redis.call('PUBLISH', ARGV[1], node) end
  if entry ~= packed then redis.call('HSET', KEYS[1], node, packed) end
  redis.call('HSET', KEYS[3], node, used)
  redis.call('HSET', KEYS[4], node, figures)
  redis.call('HSET', KEYS[2], node, string.format('%.0f', now + ttl))
  if state == '' then return '' end
  redis.call('HSETNX', KEYS[5], node, state)
  return redis.call('HGET', KEYS[5], node)
end
local done = {}
for at = 2, #ARGV, 7 do done[#done + 1] = renew(unpack(ARGV, at, at + 6)) end
return done
