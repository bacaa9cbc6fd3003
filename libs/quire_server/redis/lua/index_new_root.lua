-- `quick` of a registration: of a chunk that begins a prefix, where its bucket has no page, and nothing of it is hidden or
-- to be dropped. All such pages of one call are the same but for the fingerprint.
local new_root, to_drop, more = nil, {}, {}
quick = function(page, ARGV)
  local node, fresh, records = ARGV[1], ARGV[2], ARGV[5]
  if #records ~= 16 or node == '@object' or sub(records, 9) ~= string.rep('\0', 8) then return nil end
  local tag = sub(page, 9, 12)
  if to_drop[tag] == nil then to_drop[tag] = redis.call('EXISTS', 'quire:d:' .. tag .. node) == 1 end
  if to_drop[tag] or redis.call('EXISTS', page, 'quire:h:' .. tag .. sub(page, 13)) > 0 then return nil end
  new_root = new_root or cmsgpack.pack({{1, fresh, node}, {1, '', ''}, {}, 1, 0, 0})
  local print = sub(records, 1, 8)
  redis.call('SET', page, '\0\1' .. print .. new_root)
  more[tag] = more[tag] or {}
  count_in(more[tag], node, print, fresh, 1)
  return '2' .. fresh
end
finish = function()
  for tag, changes in pairs(more) do
    for name, each in pairs(changes) do add_to_listing('quire:l:' .. tag, name, each) end
  end
  more = {}
end
