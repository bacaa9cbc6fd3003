-- ARGV: 1 now in ms, 2 until when the deletion runs at the most, 3 fingerprints packed, 4 all keys packed, 5 the bucket's
-- key. Returns a mask: "1" to be deleted, "0" not any more, "2" not yet, or claimed by another. No object of a key that
-- has an entry is deleted: the entry may list it yet.
local now, prints, keys, mask = tonumber(ARGV[1]), ARGV[3], ARGV[4], {}
for at = 1, #prints, 8 do
  local entry, key = entry_of(sub(prints, at, at + 7)), sub(keys, at * 4 - 3, at * 4 + 28)
  local object = redis.call('HGET', objects, key)
  if object and entry and listed(entry.n, '@object') then
    redis.call('HDEL', objects, key)
    object = false
  end
  if not object then
    redis.call('ZREM', due, ARGV[5] .. key)
    mask[#mask + 1] = '0'
  elseif tonumber(string.match(object, '%d+')) > now then
    redis.call('ZADD', due, string.match(object, '%d+'), ARGV[5] .. key)
    mask[#mask + 1] = '2'
  elseif entry then
    redis.call('HSET', objects, key, ARGV[2])
    redis.call('ZADD', due, ARGV[2], ARGV[5] .. key)
    mask[#mask + 1] = '2'
  else
    redis.call('HSET', objects, key, '!' .. ARGV[2])
    redis.call('ZADD', due, ARGV[2], ARGV[5] .. key)
    mask[#mask + 1] = '1'
  end
end
return table.concat(mask)
