-- KEYS: uses, unused. ARGV: 1 record's name. A record that was stored and not catalogued is unused, unless others have
-- it.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then redis.call('SADD', KEYS[2], ARGV[1]) end
