-- ARGV: 1 node, 2 (fingerprint .. parent's) packed; the parent is 8 zero bytes for none, 3 generation of new entries (8
-- bytes), 4 the bucket of the first one's parent, where that is another one, 5 for the object tier all keys packed.
-- Returns for each 9 bytes: "1" indexed, "2" indexed and new, "0" refused (its parent is not indexed, its object is
-- being deleted, or another chunk has its fingerprint); then the generation.
local node, records, fresh, elsewhere, keys, marks = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], {}
local none = string.rep('\0', 8)
for at = 1, #records, 16 do
  local print, parent = sub(records, at, at + 7), sub(records, at + 8, at + 15)
  if parent == none then parent = '' end
  local old = entry_of(print)
  local inside = parent ~= '' and not (at == 1 and elsewhere ~= '')
  local above = inside and not old and entry_of(parent) or nil
  local refused = inside and not old and not above or old and parent_of(old) ~= parent
  if node == '@object' then
    local key = sub(keys, at * 2 - 1, at * 2 + 30)
    local object = redis.call('HGET', objects, key)
    if object and sub(object, 1, 1) == '!' then refused = true
    elseif object and not refused then redis.call('HDEL', objects, key) end
  end
  if refused then marks[#marks + 1] = '0' .. none
  else
    local entry = old or add(print, fresh, above, parent, not inside and parent ~= '' and elsewhere or '')
    if not listed(entry.n, node) then list(entry, node) end
    marks[#marks + 1] = (entry.g == fresh and '2' or '1') .. entry.g
  end
end
save()
return table.concat(marks)
