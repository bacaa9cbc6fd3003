-- KEYS: the bucket of each chunk. ARGV: all fingerprints packed. Returns for each the generation of its entry and the
-- placement, "" where it is not indexed.
local prints, found, cell, root = ARGV[1], {}, nil, nil
for at, key in ipairs(KEYS) do
  if key ~= cell then cell = key; root = redis.call('GET', key) end
  local page, row = page_with(cell, root, sub(prints, at * 8 - 7, at * 8))
  found[at] = ''
  if row then each_run(page, row, row, function(_, placement, generation) found[at] = generation .. placement end) end
end
return found
