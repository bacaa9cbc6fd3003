-- Choose the decoder of a request, and count the request there: where the same record is being decoded, or at its owner,
-- or at the least busy decoder of the owner's build (LatentBox, section 4.4).
-- KEYS: 1 the record's running requests by their end, "ticket:decoder"; 2 the ticket's place, "KEYS[1] decoder"; then for each decoder,
-- the strongest claim on the record first: its running tickets by their end, and whether it has just failed.
-- ARGV: 1 ticket, 2 requests for each device of the owner above which another decoder is asked, 3 ms that a request
-- counts unless it ends before; then for each decoder: its id, build, devices, and requests by its own report.
-- Returns the numbers of the one that is asked and of the owner, from 1, and whether the request joined another.
local now, lasts = now_ms(), tonumber(ARGV[3])
local candidates, usable = {}, {}
for at = 1, (#KEYS - 2) / 2 do
  local tickets, arg = KEYS[1 + 2 * at], 4 * at
  redis.call('ZREMRANGEBYSCORE', tickets, '-inf', now)
  local busy = math.max(redis.call('ZCARD', tickets), tonumber(ARGV[arg + 3]))
  local one = {at = at, id = ARGV[arg], build = ARGV[arg + 1], depth = busy / tonumber(ARGV[arg + 2]), tickets = tickets}
  candidates[at] = one
  if redis.call('EXISTS', KEYS[2 + 2 * at]) == 0 then
    usable[#usable + 1] = one
  end
end
if #usable == 0 then
  usable = candidates
end
local owner, runner = usable[1], nil
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for _, running in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local id = string.match(running, '^%d+:(.*)$')
  for _, one in ipairs(usable) do
    runner = runner or (one.id == id and one or nil)
  end
end
local joined = runner and 1 or 0
if not runner then
  runner = owner
  if owner.depth > tonumber(ARGV[2]) then
    for _, one in ipairs(usable) do
      if one.build == owner.build and one.depth < runner.depth then
        runner = one
      end
    end
  end
end
redis.call('ZADD', KEYS[1], now + lasts, ARGV[1] .. ':' .. runner.id)
redis.call('PEXPIRE', KEYS[1], lasts)
redis.call('SET', KEYS[2], KEYS[1] .. ' ' .. runner.id, 'PX', lasts)
redis.call('ZADD', runner.tickets, now + lasts, ARGV[1])
redis.call('PEXPIRE', runner.tickets, lasts)
return {runner.at, owner.at, joined}
