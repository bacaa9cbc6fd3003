-- `change` is the script itself, which is run for one bucket after the other. KEYS: as many for each; the first is that
-- of its first page. ARGV: 1 how many arguments all have in common, 2 how many buckets, these arguments, then those of
-- each bucket. Returns what it returned for each. `quick` answers for a bucket that needs no more, without opening it, or
-- returns nil; `finish` then writes what it has left.
local answers, common, buckets = {}, tonumber(ARGV[1]), tonumber(ARGV[2])
local own, keys_each = (#ARGV - 2 - common) / buckets, #KEYS / buckets
local arguments = {unpack(ARGV, 3, 2 + common)}
for at = 0, buckets - 1 do
  local page = KEYS[at * keys_each + 1]
  for each = 1, own do arguments[common + each] = ARGV[2 + common + at * own + each] end
  local answer = quick and quick(page, arguments)
  if not answer then
    if finish then finish() end  -- what follows may fail
    open(page)
    answer = change(arguments)
  end
  answers[at + 1] = answer
end
if finish then finish() end
return answers
