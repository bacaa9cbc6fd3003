-- ARGV: 1 now in ms, 2 fingerprints packed, the deepest chunk first, 3 when to delete objects, 4 all keys packed.
-- Removes those that no indexed chunk extends and no lease pins. Returns how many parents in other buckets follow,
-- these, then for each chunk its generation and placement if it was removed, "kept" if it was not, "absent" if it was
-- not indexed.
local now, prints, keys, removed = tonumber(ARGV[1]), ARGV[2], ARGV[4], {}
for at = 1, #prints, 8 do
  local entry = entry_of(sub(prints, at, at + 7))
  if not entry then removed[#removed + 1] = 'absent'
  elseif children(entry) > 0 or is_pinned(entry.f, now) then removed[#removed + 1] = 'kept'
  else
    removed[#removed + 1] = entry.g .. entry.n
    if listed(entry.n, '@object') then redis.call('HSET', objects, sub(keys, at * 4 - 3, at * 4 + 28), ARGV[3]) end
    remove(entry, now)
  end
end
save()
local answer = {#outside, unpack(outside)}
for i = 1, #removed do answer[#answer + 1] = removed[i] end
return answer
