-- `change` is the script itself, which is run for one bucket after the other, each with its KEYS. ARGV: 1 how many
-- arguments follow that all have in common, these, then those of each bucket. Returns what it returned for each.
local answers, common = {}, tonumber(ARGV[1])
local buckets = #KEYS / keys_each
local own = (#ARGV - 1 - common) / buckets
for at = 0, buckets - 1 do
  local arguments = {unpack(ARGV, 2, 1 + common)}
  for each = 1, own do arguments[common + each] = ARGV[1 + common + at * own + each] end
  open(at * keys_each)
  answers[at + 1] = change(arguments)
end
return answers
