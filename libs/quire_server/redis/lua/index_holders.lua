-- KEYS: the bucket of each chunk. ARGV: all fingerprints packed. Returns for each the generation of its entry and the
-- placement, "" where it is not indexed.
local prints, found, cells = ARGV[1], {}, {}
local at_once = 256  -- pages read by one command
for at, key in ipairs(KEYS) do if key ~= KEYS[at - 1] then cells[#cells + 1] = key end end
-- Pages with one chunk that were indexed together differ in its fingerprint alone: the rest is unpacked once.
local alone = {}
local function entry(cell, root, print)
  local rest = sub(root, 1, 2) == '\0\1' and sub(root, 3, 10) == print and sub(root, 11)
  if rest and alone[rest] then return alone[rest] end
  local page, row = page_with(cell, root, print)
  local answer = ''
  if row then each_run(page, row, row, function(_, placement, generation) answer = generation .. placement end) end
  if rest then alone[rest] = answer end
  return answer
end
local number, roots = 0, nil
for at, key in ipairs(KEYS) do
  if key ~= KEYS[at - 1] then
    if number % at_once == 0 then
      roots = redis.call('MGET', unpack(cells, number + 1, math.min(#cells, number + at_once)))
    end
    number = number + 1
  end
  local root = roots[(number - 1) % at_once + 1]
  found[at] = root and entry(key, root, sub(prints, at * 8 - 7, at * 8)) or ''
end
return found
