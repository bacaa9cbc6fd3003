-- KEYS: bucket, pins. ARGV: 1 fingerprint, 2 lease id, 3 expiry in ms, 4 time to live of the pins in ms, 5 now in ms, 6
-- when to look for expired pins again. Returns 0 if the chunk is gone.
if not there(KEYS[1], ARGV[1]) then return 0 end
pin(KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
return 1
