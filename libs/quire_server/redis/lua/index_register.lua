-- ARGV: 1 node, 2 generation of new entries (8 bytes), 3 the bucket of the first one's parent and the name of its link,
-- where that is another one, 4 until when the first one may be made, by its link; 5 (fingerprint .. parent's) packed; the
-- parent is 8 zero bytes for none; for the object tier 6 all keys packed, 7 the bucket's key.
-- What the node was to drop of these is obsolete. Returns for each 9 bytes: "1" indexed, "2" indexed and new, "0" refused (its parent is not indexed, its object is
-- being deleted, another chunk has its fingerprint, or its link is too old); then the generation. At the end the name of
-- the first one's link, if it is indexed with that parent.
local node, fresh, elsewhere, records, keys, marks = ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6], {}
local none, dropping = string.rep('\0', 8), redis.call('EXISTS', drops .. node) == 1
local hiding = redis.call('EXISTS', hidden) == 1
for at = 1, #records, 16 do
  local print, parent = sub(records, at, at + 7), sub(records, at + 8, at + 15)
  if parent == none then parent = '' end
  local old = entry_of(print)
  local inside = parent ~= '' and not (at == 1 and elsewhere ~= '')
  local above = inside and not old and entry_of(parent) or nil
  local late = at == 1 and not old and elsewhere ~= '' and now_ms() > tonumber(ARGV[4])
  local refused = inside and not old and not above or old and parent_of(old) ~= parent or late
  if node == '@object' then
    local key = sub(keys, at * 2 - 1, at * 2 + 30)
    local object = redis.call('HGET', objects, key)
    if object and sub(object, 1, 1) == '!' then refused = true
    elseif object and not refused then
      redis.call('HDEL', objects, key)
      redis.call('ZREM', due, ARGV[7] .. key)
    end
  end
  if refused then marks[#marks + 1] = '0' .. none
  else
    local entry = old or add(print, fresh, above, parent, not inside and parent ~= '' and elsewhere or '')
    if not listed(entry.n, node) then list(entry, node) end
    if dropping then redis.call('HDEL', drops .. node, print) end
    if hiding then unhide(print, node) end
    marks[#marks + 1] = (entry.g == fresh and '2' or '1') .. entry.g
  end
end
save()
local first, above, link = entry_of(sub(records, 1, 8)), '', ''
if first then above, link = parent_of(first) end
return table.concat(marks) .. (above == sub(records, 9, 16) and sub(link, 9) or '')
