-- KEYS: the buckets of the chain in order; to pin the last chunk that matched, their pins likewise. ARGV: 1 all
-- fingerprints packed, 2 chunks per bucket, 3 how many of the keys are buckets; to pin: 4 lease id, 5 expiry in ms, 6
-- time to live of the pins in ms, 7 now in ms, 8 when to look for expired pins again.
-- Returns {extended, count, placement, count, placement, ...}: 1 if an indexed chunk extends the last one that matched,
-- else 0; then runs of equal placement from the start of the prefix.
local prints, per_bucket, buckets = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local total, runs, last_bucket, last_print, last_page = #prints / 8, {}, nil, nil, nil
local function add(count, placement)
  local last = #runs
  if last > 0 and runs[last] == placement then runs[last - 1] = runs[last - 1] + count
  else runs[last + 1] = count; runs[last + 2] = placement end
end
-- How many chunks of the chain from one on lie behind each other in a page; the first of them does.
local function common(page, row, chunk, most)
  local here, there = 3 + 8 * (row - 1), 8 * chunk + 1
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
for b = 1, buckets do
  local first, done = (b - 1) * per_bucket, 0
  local size, cell = math.min(per_bucket, total - first), KEYS[b]
  local root = redis.call('GET', cell)
  local page = root
  while page and done < size do
    local chunk = first + done
    local print = sub(prints, 8 * chunk + 1, 8 * chunk + 8)
    local row = row_of(page, print)
    if not row then page, row = page_with(cell, root, print) end
    if not row then break end
    local count = common(page, row, chunk, math.min(count_of(page) - row + 1, size - done))
    each_run(page, row, row + count - 1, add)
    done, last_page = done + count, page
  end
  if done > 0 then last_bucket, last_print = b, sub(prints, 8 * (first + done) - 7, 8 * (first + done)) end
  if done < size then break end
end
if last_bucket and ARGV[4] then
  pin(KEYS[buckets + last_bucket], last_print, ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8])
end
table.insert(runs, 1, last_page and is_extended(last_page, row_of(last_page, last_print)) and 1 or 0)
return runs
