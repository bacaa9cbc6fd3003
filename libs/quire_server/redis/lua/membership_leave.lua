-- KEYS: members, figures. ARGV: 1 node, 2 incarnation, 3 channel. Removes the member unless a newer incarnation has its
-- name.
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.find(entry, ARGV[2], 1, true) then
  redis.call('PUBLISH', ARGV[3], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
