-- KEYS: as of reservations_add. ARGV: 1 name, 2 bytes, 3 number, 4 ms that it lasts from now on.
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d:%d:%d', now_ms() + ARGV[4], ARGV[2], ARGV[3]))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
