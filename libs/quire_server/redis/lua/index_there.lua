local function there(cell, print)
  local _, row = page_with(cell, redis.call('GET', cell), print)
  return row
end
