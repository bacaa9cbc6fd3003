-- KEYS: listings. Returns name, count, digest, name, ...: their sums.
local counts, digests, found = {}, {}, {}
for _, key in ipairs(KEYS) do
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local count, digest = string.match(all[i + 1], '(%d+):(%d+)')
    counts[all[i]] = (counts[all[i]] or 0) + count
    digests[all[i]] = ((digests[all[i]] or 0) + digest) % 281474976710656
  end
end
for name, count in pairs(counts) do
  for _, each in ipairs({name, count, string.format('%.0f', digests[name])}) do found[#found + 1] = each end
end
return found
