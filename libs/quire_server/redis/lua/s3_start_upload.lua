-- KEYS: uploads, about, objects, charged. ARGV: 1 upload, 2 packed. Whether the bucket is there.
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
count(KEYS[4], KEYS[3], ENTRY)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
