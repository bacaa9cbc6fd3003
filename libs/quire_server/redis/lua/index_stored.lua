-- KEYS: a bucket's running stores. ARGV: a store, the fingerprints of the first chunks of its ranges.
for at = 2, #ARGV do
  local field = redis.call('HGET', KEYS[1], ARGV[at])
  if field and string.sub(field, 1, 16) == ARGV[1] then redis.call('HDEL', KEYS[1], ARGV[at]) end
end
