-- ARGV: 1 now in ms, 2 when to delete objects, 3 the node that asks and needs no drop, 4 for how long drops are kept, in
-- ms, 5 fingerprints packed, the deepest chunk first, 6 all keys packed, 7 the bucket's key. Removes those that no
-- indexed chunk extends and no lease pins, and records in the same instant what each other holder has to drop. Returns how many parents in other buckets follow,
-- these, then for each chunk its generation and placement if it was removed, "kept" if it was not, "absent" if it was
-- not indexed.
local now, prints, keys, removed, dropping = tonumber(ARGV[1]), ARGV[5], ARGV[6], {}, {}
for at = 1, #prints, 8 do
  local entry = entry_of(sub(prints, at, at + 7))
  if not entry then removed[#removed + 1] = 'absent'
  elseif children(entry) > 0 or is_pinned(entry.f, now) then removed[#removed + 1] = 'kept'
  else
    removed[#removed + 1] = entry.g .. entry.n
    for name in string.gmatch(entry.n, '[^,]+') do
      if name ~= ARGV[3] and name ~= '@object' then
        redis.call('HSET', drops .. name, entry.f, entry.g .. sub(keys, at * 4 - 3, at * 4 + 28) .. sub(cell, -8))
        dropping[name] = true
      end
    end
    if listed(entry.n, '@object') then
      local key = sub(keys, at * 4 - 3, at * 4 + 28)
      redis.call('HSET', objects, key, ARGV[2])
      redis.call('ZADD', due, ARGV[2], ARGV[7] .. key)
    end
    remove(entry, now)
  end
end
save()
for name in pairs(dropping) do redis.call('PEXPIRE', drops .. name, ARGV[4]) end
local answer = {#outside, unpack(outside)}
for i = 1, #removed do answer[#answer + 1] = removed[i] end
return answer
