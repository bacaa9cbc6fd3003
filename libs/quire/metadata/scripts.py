"""The server-side scripts of the prefix index. Each touches one index segment, so each runs on a Redis Cluster.

An index segment is a hash. Fields: the 32-byte key of a chunk → the nodes that hold it, joined by commas ("" for none,
a tombstone that keeps the chain closed); key .. "c" → how many indexed chunks extend it; "@n" chunks, "@u" the
placement that is most common, "@m" how many chunks differ from it. A second hash of the same slot holds pins: key ..
lease id → expiry.
"""

from __future__ import annotations

from typing import Final

# KEYS: the segments of the chain in order. ARGV: 1 all digests packed, 2 chunks per segment.
# Returns {count, placement, count, placement, ...}: runs of equal placement from the start of the prefix.
MATCH: Final = """
local digests, per_segment = ARGV[1], tonumber(ARGV[2])
local total, runs = #digests / 32, {}
local function digest(i) return string.sub(digests, i * 32 + 1, i * 32 + 32) end
local function add(count, placement)
  local last = #runs
  if last > 0 and runs[last] == placement then runs[last - 1] = runs[last - 1] + count
  else runs[last + 1] = count; runs[last + 2] = placement end
end
for s = 1, #KEYS do
  local key, first = KEYS[s], (s - 1) * per_segment
  local n = math.min(per_segment, total - first)
  local low, high = 0, n                     -- chunks known present; bound of what may be
  if redis.call('HEXISTS', key, digest(first + n - 1)) == 1 then low = n
  else
    high = n - 1
    while low < high do
      local middle = math.floor((low + high + 1) / 2)
      if redis.call('HEXISTS', key, digest(first + middle - 1)) == 1 then low = middle else high = middle - 1 end
    end
  end
  if low > 0 then
    local shape = redis.call('HMGET', key, '@u', '@m')
    if tonumber(shape[2]) == 0 then add(low, shape[1])
    else
      for i = 0, low - 1 do add(1, redis.call('HGET', key, digest(first + i))) end
    end
  end
  if low < n then break end
end
return runs
"""

_PLACE: Final = """
local key = KEYS[1]
local shape = redis.call('HMGET', key, '@u', '@m', '@n')
local uniform, mixed, count = shape[1], tonumber(shape[2] or '0'), tonumber(shape[3] or '0')
local function place(digest, new)
  local old = redis.call('HGET', key, digest)
  if old == new then return end
  if not uniform then uniform = new end
  if not old then count = count + 1 elseif old ~= uniform then mixed = mixed - 1 end
  if new ~= uniform then mixed = mixed + 1 end
  redis.call('HSET', key, digest, new)
end
local function save()
  if mixed == count and count > 0 then       -- nobody has the old common placement: count again with a new one
    uniform, mixed = nil, 0
    local all = redis.call('HGETALL', key)
    for i = 1, #all, 2 do
      if #all[i] == 32 then
        uniform = uniform or all[i + 1]
        if all[i + 1] ~= uniform then mixed = mixed + 1 end
      end
    end
  end
  if count == 0 then redis.call('DEL', key)
  else redis.call('HSET', key, '@u', uniform, '@m', mixed, '@n', count) end
end
"""

# KEYS: segment. ARGV: 1 node, 2 (digest .. parent) packed; the parent is 32 zero bytes where it is in another segment,
# 3 "1" to add nothing new. Returns a mask: "1" indexed, "2" indexed and new, "0" refused because its parent is not
# indexed, or nothing new was wanted.
REGISTER: Final = (
    _PLACE
    + """
local node, records, mask = ARGV[1], ARGV[2], {}
local none = string.rep('\\0', 32)
for at = 1, #records, 64 do
  local digest, parent = string.sub(records, at, at + 31), string.sub(records, at + 32, at + 63)
  local old = redis.call('HGET', key, digest)
  local orphan = parent ~= none and redis.call('HEXISTS', key, parent) == 0
  if not old and (orphan or ARGV[3] == '1') then mask[#mask + 1] = '0'
  else
    local new = node
    if old and old ~= '' then
      new = old
      if not string.find(',' .. old .. ',', ',' .. node .. ',', 1, true) then new = old .. ',' .. node end
    end
    place(digest, new)
    if not old and parent ~= none then redis.call('HINCRBY', key, parent .. 'c', 1) end
    mask[#mask + 1] = old and '1' or '2'
  end
end
save()
return table.concat(mask)
"""
)

# KEYS: segment. ARGV: 1 node, 2 digests packed. The node holds these no more. Returns how many it was listed for.
UNREGISTER: Final = (
    _PLACE
    + """
local node, digests, changed = ARGV[1], ARGV[2], 0
for at = 1, #digests, 32 do
  local digest = string.sub(digests, at, at + 31)
  local old = redis.call('HGET', key, digest)
  if old then
    local left = {}
    for name in string.gmatch(old, '[^,]+') do if name ~= node then left[#left + 1] = name end end
    local new = table.concat(left, ',')
    if new ~= old then place(digest, new); changed = changed + 1 end
  end
end
save()
return changed
"""
)

# KEYS: segment, pins. ARGV: 1 now in ms, 2 (digest .. parent) packed, the deepest chunk first; zero parent as above.
# Removes those that no indexed chunk extends and no lease pins. Returns for each its placement if it was removed,
# "kept\0" if it was not, "absent\0" if it was not indexed.
EVICT: Final = (
    _PLACE
    + """
local now, records, removed, pinned = tonumber(ARGV[1]), ARGV[2], {}, {}
local none = string.rep('\\0', 32)
local pins = redis.call('HGETALL', KEYS[2])
for i = 1, #pins, 2 do
  if tonumber(pins[i + 1]) <= now then redis.call('HDEL', KEYS[2], pins[i])
  else pinned[string.sub(pins[i], 1, 32)] = true end
end
for at = 1, #records, 64 do
  local digest, parent = string.sub(records, at, at + 31), string.sub(records, at + 32, at + 63)
  local old = redis.call('HGET', key, digest)
  if old then
    if tonumber(redis.call('HGET', key, digest .. 'c') or '0') > 0 or pinned[digest] then
      removed[#removed + 1] = 'kept' .. string.char(0)
    else
      redis.call('HDEL', key, digest, digest .. 'c')
      count = count - 1
      if old ~= uniform then mixed = mixed - 1 end
      if parent ~= none then redis.call('HINCRBY', key, parent .. 'c', -1) end
      removed[#removed + 1] = old
    end
  else removed[#removed + 1] = 'absent' .. string.char(0) end
end
save()
return removed
"""
)

# KEYS: segment. ARGV: 1 digest, 2 change. Counts a child in another segment. Returns 0 if the chunk is not indexed.
COUNT_CHILD: Final = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[1], ARGV[1] .. 'c', ARGV[2])
return 1
"""

# KEYS: segment, pins. ARGV: 1 digest, 2 lease id, 3 expiry in ms, 4 time to live of the pins in ms.
# Returns 0 if the chunk is gone.
PIN: Final = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1] .. ARGV[2], ARGV[3])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[4]) then redis.call('PEXPIRE', KEYS[2], ARGV[4]) end
return 1
"""
