-- ARGV: 1 node, 2 fingerprints packed, 3 now in ms, 4 "1": only where the object tier is listed too, 5 only where so
-- many other nodes are. The node holds these no more; an entry without holder and child is removed. Returns a mask, "1"
-- where the node is not listed now, then parents in other buckets that lost a child.
local node, prints, now, mask = ARGV[1], ARGV[2], tonumber(ARGV[3]), {}
for at = 1, #prints, 8 do
  local entry = entry_of(sub(prints, at, at + 7))
  local old = entry and entry.n or ''
  local others = 0
  for name in string.gmatch(old, '[^,]+') do
    if name ~= node and name ~= '@object' then others = others + 1 end
  end
  local stays = ARGV[4] == '1' and not listed(old, '@object') or others < tonumber(ARGV[5])
  if not stays and entry and listed(old, node) then
    unlist(entry, node)
  end
  mask[#mask + 1] = stays and '0' or '1'
  if entry and entry.n == '' and children(entry) <= 0 then remove(entry, now) end
end
save()
return {table.concat(mask), unpack(outside)}
