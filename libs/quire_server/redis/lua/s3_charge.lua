-- KEYS: charged, objects. Returns the charge, counted if it was not.
count(KEYS[1], KEYS[2], 0) return redis.call('GET', KEYS[1])
