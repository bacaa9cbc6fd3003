-- ARGV: 1 fingerprint of a parent in this bucket, 2 fingerprint of a child in another one, 3 name of the link, 8 bytes, 4
-- for how long the child may be registered by it, in ms. From now on the child keeps the parent. Returns until when the
-- child may be registered, in ms; 0 if the parent is not indexed. Links of other names between the two stay beside it.
local entry = entry_of(ARGV[1])
if not entry then return '0' end
if redis.call('HSETNX', links, ARGV[1] .. ARGV[2] .. ARGV[3], now_ms()) == 1 then add_children(entry, 1) end
save()
return string.format('%.0f', now_ms() + tonumber(ARGV[4]))
