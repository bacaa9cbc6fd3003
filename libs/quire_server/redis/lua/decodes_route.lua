-- Choose the decoder of a request, and count the request there: where the same record is being decoded, or at its owner,
-- or at the least busy decoder of the owner's build (LatentBox, section 4.4). Only above theta are the others looked at.
-- KEYS: 1 the record's running requests by their end, "ticket:decoder"; 2 the ticket's place, "KEYS[1] decoder"; then for
-- each decoder, the strongest claim on the record first: its running tickets by their end, and whether it has just failed.
-- ARGV: 1 ticket, 2 requests for each device of the owner above which another decoder is asked, 3 ms that a request
-- counts unless it ends before; then for each decoder: its id, build, devices, and requests by its own report.
-- Returns the numbers of the one that is asked and of the owner, from 1, and whether the request joined another.
local now, lasts = now_ms(), tonumber(ARGV[3])
local count = (#KEYS - 2) / 2

local function failed(at)
  return redis.call('EXISTS', KEYS[2 + 2 * at]) == 1
end

local function depth(at)
  local tickets, arg = KEYS[1 + 2 * at], 4 * at
  redis.call('ZREMRANGEBYSCORE', tickets, '-inf', now)
  return math.max(redis.call('ZCARD', tickets), tonumber(ARGV[arg + 3])) / tonumber(ARGV[arg + 2])
end

-- Keys of requests that run longer, as other orchestrators may allow, keep their time.
local function keep(key)
  if redis.call('PTTL', key) < lasts then
    redis.call('PEXPIRE', key, lasts)
  end
end

local place = string.match(redis.call('GET', KEYS[2]) or '', ' (.*)$')
if place then -- the request was sent again, as its answer was lost: it counts once
  redis.call('ZREM', KEYS[1], ARGV[1] .. ':' .. place)
  for at = 1, count do
    if ARGV[4 * at] == place then
      redis.call('ZREM', KEYS[1 + 2 * at], ARGV[1])
    end
  end
end

local all_failed = true
local owner
for at = 1, count do
  if not failed(at) then
    owner, all_failed = at, false
    break
  end
end
owner = owner or 1

local runner
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local running = redis.call('ZRANGE', KEYS[1], 0, -1)
if #running > 0 then
  local numbers = {}
  for at = 1, count do
    numbers[ARGV[4 * at]] = at
  end
  local seen = {}
  for _, entry in ipairs(running) do
    local id = string.match(entry, '^%d+:(.*)$')
    local at = numbers[id]
    if at and not seen[id] then
      seen[id] = true
      if all_failed or not failed(at) then
        runner = at
        break
      end
    end
  end
end
local joined = runner and 1 or 0

if not runner then
  runner = owner
  local least = depth(owner)
  if least > tonumber(ARGV[2]) then
    for at = 1, count do
      if at ~= owner and ARGV[4 * at + 1] == ARGV[4 * owner + 1] and (all_failed or not failed(at)) then
        local other = depth(at)
        if other < least then
          runner, least = at, other
        end
      end
    end
  end
end
local id, tickets = ARGV[4 * runner], KEYS[1 + 2 * runner]
redis.call('ZADD', KEYS[1], now + lasts, ARGV[1] .. ':' .. id)
keep(KEYS[1])
redis.call('SET', KEYS[2], KEYS[1] .. ' ' .. id, 'PX', lasts)
redis.call('ZADD', tickets, now + lasts, ARGV[1])
keep(tickets)
return {runner, owner, joined}
