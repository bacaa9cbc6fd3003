-- KEYS: listings. ARGV: 1 a node, "" for all. Returns name, count, digest, name, ...: their sums.
local counts, digests, found = {}, {}, {}
local function add(name, listing)
  local count, digest = string.match(listing, '(%d+):(%d+)')
  counts[name] = (counts[name] or 0) + count
  digests[name] = ((digests[name] or 0) + digest) % 281474976710656
end
for _, key in ipairs(KEYS) do
  if ARGV[1] ~= '' then
    local listing = redis.call('HGET', key, ARGV[1])
    if listing then add(ARGV[1], listing) end
  else
    local all = redis.call('HGETALL', key)
    for i = 1, #all, 2 do add(all[i], all[i + 1]) end
  end
end
for name, count in pairs(counts) do
  for _, each in ipairs({name, count, string.format('%.0f', digests[name])}) do found[#found + 1] = each end
end
return found
