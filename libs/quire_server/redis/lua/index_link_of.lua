-- KEYS: a bucket. ARGV: a fingerprint. Returns the bucket of the parent of the chunk and the name of the link to it, ""
-- where the chunk is not indexed, or has no parent in another bucket.
local page, row = page_with(KEYS[1], redis.call('GET', KEYS[1]), ARGV[1])
if not row then return '' end
local _, links = unpack(about(page))
for at = 1, #links, 3 do
  if links[at] == row then return links[at + 2] end
end
return ''
