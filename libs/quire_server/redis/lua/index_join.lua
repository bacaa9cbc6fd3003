-- ARGV: 1 node, 2 "1" to skip entries that do not list the object tier, 3 fingerprints packed, 4 generations (8 bytes each)
-- packed. Lists the node in these very entries; what it was to drop of them is obsolete. Returns a mask: "1" listed, "0"
-- there is no such entry.
local node, only_in_object, prints, generations, mask = ARGV[1], ARGV[2] == '1', ARGV[3], ARGV[4], {}
local hiding = redis.call('EXISTS', hidden) == 1
for at = 1, #prints, 8 do
  local print = sub(prints, at, at + 7)
  local entry = entry_of(print)
  if not entry or entry.g ~= sub(generations, at, at + 7) or (only_in_object and not listed(entry.n, '@object')) then
    mask[#mask + 1] = '0'
  else
    if not listed(entry.n, node) then list(entry, node) end
    redis.call('HDEL', drops .. node, print)
    if hiding then unhide(print, node) end
    mask[#mask + 1] = '1'
  end
end
save()
return table.concat(mask)
