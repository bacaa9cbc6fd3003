-- KEYS: a page. ARGV: 1 node. Returns (fingerprint .. generation) of the chunks that it is listed for, packed.
local page, found = redis.call('GET', KEYS[1]), {}
if not page then return '' end
local spans = about(page)[1]
for at = 1, #spans, 3 do
  if find(',' .. spans[at + 2] .. ',', ',' .. ARGV[1] .. ',', 1, true) then
    for row = spans[at], (spans[at + 3] or count_of(page) + 1) - 1 do
      found[#found + 1] = sub(page, 8 * row - 5, 8 * row + 2) .. spans[at + 1]
    end
  end
end
return table.concat(found)
