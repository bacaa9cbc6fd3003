-- KEYS: members, figures, states of storage nodes. ARGV: 1 node, 2 incarnation, 3 channel, 4 a state: a storage node in
-- this state is not expected any more; "" for none. Removes the member unless a newer incarnation has its name.
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.find(entry, ARGV[2], 1, true) then
  redis.call('PUBLISH', ARGV[3], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
  if redis.call('HGET', KEYS[3], ARGV[1]) == ARGV[4] then redis.call('HDEL', KEYS[3], ARGV[1]) end
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
