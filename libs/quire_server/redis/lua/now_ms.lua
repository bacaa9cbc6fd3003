-- The clock of this Redis, in ms since the Unix epoch: what is compared with each other is judged by one clock.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
