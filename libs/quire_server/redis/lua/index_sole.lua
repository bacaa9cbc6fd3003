-- KEYS: pages. ARGV: 1 node, then the holders whose copies count. Returns how many chunks that the node is listed for
-- none of them is listed for.
local sole, counts = 0, {}
for at = 2, #ARGV do counts[ARGV[at]] = true end
local function count_page(page)
  each_run(page, 1, count_of(page), function(count, placement)
    local here, elsewhere = false, false
    for name in string.gmatch(placement, '[^,]+') do
      if name == ARGV[1] then here = true elseif counts[name] then elsewhere = true end
    end
    if here and not elsewhere then sole = sole + count end
  end)
end
for _, key in ipairs(KEYS) do
  local page = redis.call('GET', key)
  if page then count_page(page) end
end
return sole
