-- End a request. KEYS: 1 the ticket's place, "record's key decoder"; 2 the record's running requests, 3 the decoder's
-- tickets, 4 whether the decoder has just failed: as the place has them. ARGV: 1 ticket, 2 decoder, 3 ms for which the
-- decoder is passed over, 0 for one that answered. Returns whether the request was running.
local there = redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1] .. ':' .. ARGV[2])
redis.call('ZREM', KEYS[3], ARGV[1])
if there == 1 and ARGV[3] ~= '0' then
  redis.call('SET', KEYS[4], 1, 'PX', ARGV[3])
end
return there
