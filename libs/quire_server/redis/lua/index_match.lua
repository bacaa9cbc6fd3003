-- KEYS: the bucket of the first chunk, and, to pin the last one that matched, its pins; the other buckets' names are made
-- of these. ARGV: 1 fingerprints packed, 2 chunks of the prefix, 3 chunks per bucket, 4 and 5 from which bucket on, and
-- up to before which, every fingerprint is sent; of the other buckets only the first and the last one is, 6 hash tags;
-- to pin: 7 lease id, 8 expiry in ms, 9 time to live of the pins in ms, 10 now in ms, 11 when to look for expired pins
-- again.
-- Returns {extended, count, placement, count, placement, ...}: 1 if an indexed chunk extends the last one that matched,
-- else 0; then runs of equal placement from the start of the prefix. Where the prefix ends within a bucket whose
-- fingerprints are not all there, instead of 1 or 0 the number of that bucket, from -1 downwards; then nothing is pinned.
local prints, total, per_bucket = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local whole_from, whole_stop, tags = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local at, runs, opener, last_print, last_page, wanted = 0, {}, nil, nil, nil, nil
local function add(count, placement)
  local last = #runs
  if last > 0 and runs[last] == placement then runs[last - 1] = runs[last - 1] + count
  else runs[last + 1] = count; runs[last + 2] = placement end
end
local function print_at(place) return sub(prints, 8 * place + 1, 8 * place + 8) end
-- The name that a key of the first bucket has of another one.
local function named(key, bucket)
  return string.format('%s{%02x}', sub(key, 1, #key - 12), byte(bucket) % tags) .. bucket
end
-- How many chunks of the chain from one on lie behind each other in a page; the first of them does.
local function common(page, row, place, most)
  local here, there = 3 + 8 * (row - 1), 8 * place + 1
  local function same(count)
    return sub(page, here, here + 8 * count - 1) == sub(prints, there, there + 8 * count - 1)
  end
  if same(most) then return most end
  local low, high = 1, most - 1
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    if same(middle) then low = middle else high = middle - 1 end
  end
  return low
end
-- Follow the chain through a bucket as far as it is indexed; how many of its chunks are.
local function follow(cell, root, size)
  local page, done = root, 0
  while page and done < size do
    local print = print_at(at + done)
    local row = row_of(page, print)
    if not row then page, row = page_with(cell, root, print) end
    if not row then break end
    local count = common(page, row, at + done, math.min(count_of(page) - row + 1, size - done))
    each_run(page, row, row + count - 1, add)
    done, last_page = done + count, page
  end
  return done
end
-- Go from the last chunk of a bucket back to the first by their parents; how many there are, nil if they are not `size`.
local function go_back(cell, root, size)
  local first, print, left, parts = print_at(at), print_at(at + 1), size, {}
  local page, row = root, size  -- there it is if nothing else is in the bucket
  if row > count_of(root) or sub(root, 8 * row - 5, 8 * row + 2) ~= print then
    page, row = page_with(cell, root, print)
  end
  local end_page = page
  while row do
    local links = about(page)[2]
    local link = place_of(links, 3, row)
    local from = math.max(links[link], row - left + 1)
    parts[#parts + 1] = {page, from, row}
    left = left - (row - from + 1)
    if left == 0 then
      if sub(page, 8 * from - 5, 8 * from + 2) ~= first then return nil end
      for part = #parts, 1, -1 do each_run(parts[part][1], parts[part][2], parts[part][3], add) end
      last_page = end_page
      return size
    end
    if links[link + 1] == '' or links[link + 2] ~= '' then return nil end
    page, row = page_with(cell, root, links[link + 1])
  end
  return nil
end
for b = 1, math.ceil(total / per_bucket) do
  local size, cell = math.min(per_bucket, total - (b - 1) * per_bucket), named(KEYS[1], print_at(at))
  local whole = size <= 2 or (b > whole_from and b <= whole_stop)
  local root = redis.call('GET', cell)
  local done = not root and 0 or whole and follow(cell, root, size) or go_back(cell, root, size)
  if not done then
    local _, row = page_with(cell, root, print_at(at))
    if row then wanted = -b; break end
    done = 0
  end
  if done > 0 then
    opener, last_print = print_at(at), print_at(at + (whole and done - 1 or 1))
  end
  if done < size then break end
  at = at + (whole and size or 2)
end
if opener and ARGV[7] and not wanted then
  pin(named(KEYS[2], opener), last_print, unpack(ARGV, 7))
end
local extended = last_page and is_extended(last_page, row_of(last_page, last_print)) and 1 or 0
table.insert(runs, 1, wanted or extended)
return runs
