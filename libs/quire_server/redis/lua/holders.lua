-- KEYS: the bucket of each chunk. ARGV: all fingerprints packed. Returns the placement of each, "" where it is not
-- indexed.
local prints, found, cell, root = ARGV[1], {}, nil, nil
for at, key in ipairs(KEYS) do
  local print = sub(prints, at * 8 - 7, at * 8)
  if key ~= cell then cell = key; root = redis.call('GET', key) end
  local page, row = root, root and row_of(root, print)
  if root and not row then
    local id = page_of(cell, about(root)[5], print)
    page = id and redis.call('GET', page_key(cell, id))
    row = page and row_of(page, print)
  end
  found[at] = ''
  if row then each_run(page, row, row, function(_, placement) found[at] = placement end) end
end
return found
