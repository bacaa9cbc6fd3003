-- ARGV: 1 fingerprint of a parent in this bucket, 2 fingerprint of a child in another one that no entry has by this
-- link, 3 the link's name, "" for a child of before there were links, which was only counted, 4 now in ms, 5 leases that
-- the child had, as `move_pins` packs them. Links of other names stay: they are other registrations'. Returns parents in
-- other buckets that lost this one, which has neither a holder nor a child any more.
local entry, now = entry_of(ARGV[1]), tonumber(ARGV[4])
local mine = ARGV[3] ~= '' and redis.call('HDEL', links, ARGV[1] .. ARGV[2] .. ARGV[3]) == 1
if not entry then return outside end
for at = 1, #ARGV[5], 32 do
  hold(ARGV[1], sub(ARGV[5], at, at + 15), tonumber(sub(ARGV[5], at + 16, at + 31)), now)
end
if mine or ARGV[3] == '' then add_children(entry, -1) end
if children(entry) <= 0 and entry.n == '' then remove(entry, now) end
save()
return outside
