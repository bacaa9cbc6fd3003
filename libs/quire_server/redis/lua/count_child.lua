-- ARGV: 1 fingerprint, 2 change, 3 now in ms, 4 leases that the child had, as `move_pins` packs them. Counts a child in
-- another bucket. Returns "0" if the chunk is not indexed, else "1" and, if it went because it has neither a holder nor
-- a child any more, parents in other buckets.
local entry, now = entry_of(ARGV[1]), tonumber(ARGV[3])
if not entry then return {'0'} end
for at = 1, #ARGV[4], 32 do
  hold(ARGV[1], sub(ARGV[4], at, at + 15), tonumber(sub(ARGV[4], at + 16, at + 31)), now)
end
add_children(entry, tonumber(ARGV[2]))
if children(entry) <= 0 and entry.n == '' then remove(entry, now) end
save()
return {'1', unpack(outside)}
