-- ARGV: 1 when to delete them, 2 fingerprints packed, 3 all keys packed, 4 the bucket's key. Notes objects that no entry
-- lists. Returns a mask: "1" noted, "2" listed already, "!" it is being deleted.
local prints, keys, mask = ARGV[2], ARGV[3], {}
for at = 1, #prints, 8 do
  local entry, key = entry_of(sub(prints, at, at + 7)), sub(keys, at * 4 - 3, at * 4 + 28)
  local object = redis.call('HGET', objects, key)
  if object and sub(object, 1, 1) == '!' then mask[#mask + 1] = '!'
  elseif entry and listed(entry.n, '@object') then mask[#mask + 1] = '2'
  else
    if not object or tonumber(object) < tonumber(ARGV[1]) then
      redis.call('HSET', objects, key, ARGV[1])
      redis.call('ZADD', due, ARGV[1], ARGV[4] .. key)
    end
    mask[#mask + 1] = '1'
  end
end
return table.concat(mask)
