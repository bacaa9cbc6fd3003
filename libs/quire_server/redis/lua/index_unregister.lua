-- ARGV: 1 node, 2 now in ms, 3 "1": only where the object tier is listed too, 4 only where each of these nodes, joined by
-- commas, is listed, and no lease pins the chunk; "" for no such condition; 5 the node hides its copies: for how long
-- that is known, in ms, else ""; 6 fingerprints packed. The node is listed for these no more; an entry without holder and
-- child is removed. Returns a mask, "1" where the node is not listed now, then
-- parents in other buckets that lost a child.
local node, now, prints, mask = ARGV[1], tonumber(ARGV[2]), ARGV[6], {}
for at = 1, #prints, 8 do
  local entry = entry_of(sub(prints, at, at + 7))
  local old = entry and entry.n or ''
  local stays = ARGV[3] == '1' and not listed(old, '@object')
  for name in string.gmatch(ARGV[4], '[^,]+') do stays = stays or name == node or not listed(old, name) end
  if ARGV[4] ~= '' and entry and is_pinned(entry.f, now) then stays = true end
  if not stays and entry and listed(old, node) then
    unlist(entry, node)
    if ARGV[5] ~= '' then hide(entry.f, node, entry.g, ARGV[5]) end
  end
  mask[#mask + 1] = stays and '0' or '1'
  if entry and entry.n == '' and children(entry) <= 0 then remove(entry, now) end
end
save()
return {table.concat(mask), unpack(outside)}
