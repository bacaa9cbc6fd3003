-- What all scripts share that look into pages.
local sub, byte, char, find = string.sub, string.byte, string.char, string.find
local function page_key(cell, id) return id == 0 and cell or cell .. struct.pack('>I3', id) end
local function count_of(page) local high, low = byte(page, 1, 2) return high * 256 + low end
local unpacked = {}
-- What is known of a page's chunks (`index_format`).
local function about(page)
  local known = unpacked[page]
  if not known then known = cmsgpack.unpack(sub(page, 3 + 8 * count_of(page))); unpacked[page] = known end
  return known
end
-- The row of a fingerprint among those that are packed from one byte to before another, or nil.
local function row_among(packed, print, from, stop)
  local at = from
  while true do
    at = find(packed, print, at, true)
    if not at or at >= stop then return nil end
    if (at - from) % 8 == 0 then return (at - from) / 8 + 1 end
    at = at + 1
  end
end
local function row_of(page, print) return row_among(page, print, 3, 3 + 8 * count_of(page)) end
local function directory(cell, slots, print)
  local high, low = struct.unpack('>I1I4', print)
  local level = 1
  while level * 2 <= slots do level = level * 2 end
  local slot = low % (level * 2)
  if slot >= slots then slot = low % level end
  return cell .. 'd' .. struct.pack('>I4', slot)
end
-- The number of the page beside the first one that has a chunk, or nil.
local function page_of(cell, slots, print)
  if slots == 0 then return nil end
  return tonumber(redis.call('HGET', directory(cell, slots, print), sub(print, 1, 5)) or nil)
end
-- The page that has a chunk of a bucket with that first page, and the row there; the row is nil where none has.
local function page_with(cell, root, print)
  local row = root and row_of(root, print)
  if row or not root then return root, row end
  local id = page_of(cell, about(root)[5], print)
  local page = id and redis.call('GET', page_key(cell, id))
  return page, page and row_of(page, print)
end
-- The index in a list of (row, ...) of the last one that is not behind a row; 1 - stride if all are.
local function place_of(list, stride, row)
  local low, high = 0, #list / stride
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    if list[(middle - 1) * stride + 1] <= row then low = middle else high = middle - 1 end
  end
  return (low - 1) * stride + 1
end
-- Whether an indexed chunk extends a row.
local function is_extended(page, row)
  local _, links, extra = unpack(about(page))
  for at = 1, #extra, 2 do if extra[at] == row then return true end end
  if row == count_of(page) then return false end
  for at = 1, #links, 3 do if links[at] == row + 1 then return false end end
  return true
end
-- The holders of rows, run by run.
local function each_run(page, from, to, add)
  local spans = about(page)[1]
  for at = 1, #spans, 3 do
    local first, last = spans[at], (spans[at + 3] or count_of(page) + 1) - 1
    if last >= from and first <= to then
      add(math.min(last, to) - math.max(first, from) + 1, spans[at + 2], spans[at + 1])
    end
  end
end
