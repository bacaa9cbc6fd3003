-- ARGV: 1 node, 2 fingerprints packed, 3 now in ms, 4 "1": only where the object tier is listed too, 5 only where each of
-- these nodes, joined by commas, is listed, and no lease pins the chunk; "" for no such condition. The node holds these
-- no more; an entry without holder and child is removed. Returns a mask, "1"
-- where the node is not listed now, then parents in other buckets that lost a child.
local node, prints, now, mask = ARGV[1], ARGV[2], tonumber(ARGV[3]), {}
for at = 1, #prints, 8 do
  local entry = entry_of(sub(prints, at, at + 7))
  local old = entry and entry.n or ''
  local stays = ARGV[4] == '1' and not listed(old, '@object')
  for name in string.gmatch(ARGV[5], '[^,]+') do stays = stays or name == node or not listed(old, name) end
  if ARGV[5] ~= '' and entry and is_pinned(entry.f, now) then stays = true end
  if not stays and entry and listed(old, node) then
    unlist(entry, node)
  end
  mask[#mask + 1] = stays and '0' or '1'
  if entry and entry.n == '' and children(entry) <= 0 then remove(entry, now) end
end
save()
return {table.concat(mask), unpack(outside)}
