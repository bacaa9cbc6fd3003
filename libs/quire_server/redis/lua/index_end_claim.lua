-- KEYS: objects, objects that are due. ARGV: 1 keys packed, 2 the claim, 3 the bucket's key, 4 when the objects are due
-- again, "" if they are deleted. Leaves an object alone that another call has claimed in the meantime.
for at = 1, #ARGV[1], 32 do
  local key = string.sub(ARGV[1], at, at + 31)
  if redis.call('HGET', KEYS[1], key) == '!' .. ARGV[2] then
    if ARGV[4] == '' then
      redis.call('HDEL', KEYS[1], key)
      redis.call('ZREM', KEYS[2], ARGV[3] .. key)
    else
      redis.call('HSET', KEYS[1], key, ARGV[4])
      redis.call('ZADD', KEYS[2], ARGV[4], ARGV[3] .. key)
    end
  end
end
return 1
