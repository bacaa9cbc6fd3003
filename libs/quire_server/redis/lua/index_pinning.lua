-- What the scripts that pin share: a lease keeps a chunk, and with it all that it extends, until it expires. A pin of the
-- same id is never shortened.
local function pin(pins, print, lease, expires, ttl, now, look_again)
  if tonumber(redis.call('HGET', pins, '@p') or '0') <= tonumber(now) then
    local all = redis.call('HGETALL', pins)
    for i = 1, #all, 2 do
      if #all[i] > 8 and tonumber(all[i + 1]) <= tonumber(now) then redis.call('HDEL', pins, all[i]) end
    end
    redis.call('HSET', pins, '@p', look_again)
  end
  local known = redis.call('HGET', pins, print .. lease)
  if not known or tonumber(known) < tonumber(expires) then redis.call('HSET', pins, print .. lease, expires) end
  if redis.call('PTTL', pins) < tonumber(ttl) then redis.call('PEXPIRE', pins, ttl) end
end
