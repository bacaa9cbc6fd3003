-- ARGV: 1 now in ms, 2 when to delete objects, 3 the node that asks and needs no drop, 4 for how long drops are kept, in
-- ms, 5 fingerprints packed, the deepest chunk first, 6 all keys packed, 7 the bucket's key. Removes those that no
-- indexed chunk extends and no lease pins, and records in the same instant what each other holder has to drop, and each
-- node that hides a copy of these or of chunks that are not indexed. Returns how many parents in other buckets follow,
-- these, then for each chunk its generation and placement if it was removed, "kept" if it was not, "absent" if it was
-- not indexed; then for each hidden copy the number of its chunk, and its generation and node.
local now, prints, keys, removed, dropping, found = tonumber(ARGV[1]), ARGV[5], ARGV[6], {}, {}, {}
local hiding = redis.call('EXISTS', hidden) == 1
for at = 1, #prints, 8 do
  local print, key = sub(prints, at, at + 7), sub(keys, at * 4 - 3, at * 4 + 28)
  local entry = entry_of(print)
  local function drop(name, generation)
    if name == ARGV[3] or name == '@object' then return end
    redis.call('HSET', drops .. name, print, generation .. key .. sub(cell, -8))
    dropping[name] = true
  end
  if entry and (children(entry) > 0 or is_pinned(print, now)) then removed[#removed + 1] = 'kept'
  else
    if hiding then
      local nodes = hidden_of(print)
      for each = 1, #nodes, 2 do
        drop(nodes[each], nodes[each + 1])
        insert(found, #found + 1, (at + 7) / 8 - 1, nodes[each + 1] .. nodes[each])
      end
      redis.call('HDEL', hidden, print)
    end
    removed[#removed + 1] = entry and entry.g .. entry.n or 'absent'
    if entry then
      for name in string.gmatch(entry.n, '[^,]+') do drop(name, entry.g) end
      if listed(entry.n, '@object') then
        redis.call('HSET', objects, key, ARGV[2])
        redis.call('ZADD', due, ARGV[2], ARGV[7] .. key)
      end
      remove(entry, now)
    end
  end
end
save()
for name in pairs(dropping) do redis.call('PEXPIRE', drops .. name, ARGV[4]) end
local answer = {#outside, unpack(outside)}
for i = 1, #removed do answer[#answer + 1] = removed[i] end
for i = 1, #found do answer[#answer + 1] = found[i] end
return answer
