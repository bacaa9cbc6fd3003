-- KEYS: about, settings. ARGV: 1 name, 2 value, "" for none. Whether the bucket is there.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if ARGV[2] == '' then redis.call('HDEL', KEYS[2], ARGV[1]) else redis.call('HSET', KEYS[2], ARGV[1], ARGV[2]) end
return 1
