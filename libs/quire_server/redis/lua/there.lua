local function there(cell, print)
  local root = redis.call('GET', cell)
  if not root or row_of(root, print) then return root end
  local id = page_of(cell, about(root)[5], print)
  local page = id and redis.call('GET', page_key(cell, id))
  return page and row_of(page, print)
end
