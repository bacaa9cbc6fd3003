-- ARGV: 1 fingerprints packed, 2 generations (8 bytes each) packed, 3 all keys packed, 4 the bucket's key. Lists the object tier in these
-- very entries. Returns a mask: "1" listed, "0" there is no such entry, "!" the object is being deleted.
local prints, generations, keys, mask = ARGV[1], ARGV[2], ARGV[3], {}
for at = 1, #prints, 8 do
  local entry, key = entry_of(sub(prints, at, at + 7)), sub(keys, at * 4 - 3, at * 4 + 28)
  local object = redis.call('HGET', objects, key)
  if object and sub(object, 1, 1) == '!' then mask[#mask + 1] = '!'
  elseif not entry or entry.g ~= sub(generations, at, at + 7) then mask[#mask + 1] = '0'
  else
    if object then redis.call('HDEL', objects, key) end
    redis.call('ZREM', due, ARGV[4] .. key)
    if not listed(entry.n, '@object') then list(entry, '@object') end
    mask[#mask + 1] = '1'
  end
end
save()
return table.concat(mask)
