-- KEYS: a node's drops. ARGV: 1 fingerprints packed, 2 generations packed. The node has carried these out: they are
-- forgotten, but for those whose entry has ended again since.
for at = 1, #ARGV[1], 8 do
  local print = string.sub(ARGV[1], at, at + 7)
  local drop = redis.call('HGET', KEYS[1], print)
  if drop and string.sub(drop, 1, 8) == string.sub(ARGV[2], at, at + 7) then redis.call('HDEL', KEYS[1], print) end
end
return 1
