-- KEYS: bucket. ARGV: 1 fingerprint. Whether the chunk is indexed.
return there(KEYS[1], ARGV[1]) and 1 or 0
