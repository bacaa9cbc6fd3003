"""The server-side scripts of the prefix index. Each touches one index bucket, and what nodes are listed for.

An index bucket is a hash. Fields: the 32-byte key of a chunk → the nodes that hold it, joined by commas ("" for none,
which keeps the chain closed while others extend it); key .. "g" → generation of the entry (8 bytes), then the key of
its parent, then the parent's bucket where that is another one; key .. "c" → how many indexed chunks extend it; "@n"
chunks, "@u" the placement that is most common, "@m" how many chunks differ from it.

Beside it, in the same slot, lie a hash of pins (key .. lease id → expiry; "@p": when to look for expired ones), and a
hash of objects that nothing lists any more (key → when to delete it, or "!" and until when its deletion runs). A hash
for the whole cluster counts what each node is listed for (node → count:digest).
"""

from __future__ import annotations

from typing import Final

# What the scripts that pin share: a lease keeps a chunk, and with it all that it extends, until it expires.
_PIN: Final = """
local function pin(pins, digest, lease, expires, ttl, now, look_again)
  if tonumber(redis.call('HGET', pins, '@p') or '0') <= tonumber(now) then
    local all = redis.call('HGETALL', pins)
    for i = 1, #all, 2 do
      if #all[i] > 32 and tonumber(all[i + 1]) <= tonumber(now) then redis.call('HDEL', pins, all[i]) end
    end
    redis.call('HSET', pins, '@p', look_again)
  end
  redis.call('HSET', pins, digest .. lease, expires)
  if redis.call('PTTL', pins) < tonumber(ttl) then redis.call('PEXPIRE', pins, ttl) end
end
"""

# KEYS: the buckets of the chain in order; to pin the last chunk that matched, their pins likewise. ARGV: 1 all digests
# packed, 2 chunks per bucket, 3 how many of the keys are buckets; to pin: 4 lease id, 5 expiry in ms, 6 time to live of
# the pins in ms, 7 now in ms, 8 when to look for expired pins again.
# Returns {count, placement, count, placement, ...}: runs of equal placement from the start of the prefix.
MATCH: Final = (
    _PIN
    + """
local digests, per_bucket, buckets = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local total, runs, last_bucket, last_digest = #digests / 32, {}, nil, nil
local function digest(i) return string.sub(digests, i * 32 + 1, i * 32 + 32) end
local function add(count, placement)
  local last = #runs
  if last > 0 and runs[last] == placement then runs[last - 1] = runs[last - 1] + count
  else runs[last + 1] = count; runs[last + 2] = placement end
end
for s = 1, buckets do
  local key, first = KEYS[s], (s - 1) * per_bucket
  local n = math.min(per_bucket, total - first)
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
    last_bucket, last_digest = s, digest(first + low - 1)
    local shape = redis.call('HMGET', key, '@u', '@m')
    if tonumber(shape[2]) == 0 then add(low, shape[1])
    else
      for i = 0, low - 1 do add(1, redis.call('HGET', key, digest(first + i)) or '') end
    end
  end
  if low < n then break end
end
if last_bucket and ARGV[4] then
  pin(KEYS[buckets + last_bucket], last_digest, ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8])
end
return runs
"""
)

# KEYS: the bucket of each chunk. ARGV: all digests packed. Returns the placement of each, "" where it is not indexed.
HOLDERS: Final = """
local digests, found = ARGV[1], {}
for at, key in ipairs(KEYS) do
  found[at] = redis.call('HGET', key, string.sub(digests, at * 32 - 31, at * 32)) or ''
end
return found
"""

# What the scripts that change a bucket share. KEYS: bucket, pins, objects, listings.
_BUCKET: Final = """
local key, pins, objects, listings = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local shape = redis.call('HMGET', key, '@u', '@m', '@n')
local uniform, mixed, count = shape[1], tonumber(shape[2] or '0'), tonumber(shape[3] or '0')
local changed = {}
local function six(bytes)
  local b1, b2, b3, b4, b5, b6 = string.byte(bytes, 1, 6)
  return ((((b1 * 256 + b2) * 256 + b3) * 256 + b4) * 256 + b5) * 256 + b6
end
-- `about` begins with the generation of the entry.
local function note(name, digest, about, sign)
  local each = changed[name] or {0, 0}
  each[1] = each[1] + sign
  local number = six(digest) + six(about)
  each[2] = (each[2] + sign * number) % 281474976710656   -- doubles are exact up to 2^53
  changed[name] = each
end
local function listed(placement, name) return string.find(',' .. placement .. ',', ',' .. name .. ',', 1, true) end
local function place(digest, new)
  local old = redis.call('HGET', key, digest)
  if old == new then return end
  if not uniform then uniform = new end
  if not old then count = count + 1 elseif old ~= uniform then mixed = mixed - 1 end
  if new ~= uniform then mixed = mixed + 1 end
  redis.call('HSET', key, digest, new)
end
local function without(placement, name)
  local left = {}
  for each in string.gmatch(placement, '[^,]+') do if each ~= name then left[#left + 1] = each end end
  return table.concat(left, ',')
end
local function children(digest) return tonumber(redis.call('HGET', key, digest .. 'c') or '0') end
local pinned = nil
local function is_pinned(digest, now)
  if not pinned then
    pinned = {}
    local all = redis.call('HGETALL', pins)
    for i = 1, #all, 2 do
      if #all[i] > 32 then
        if tonumber(all[i + 1]) <= now then redis.call('HDEL', pins, all[i])
        else pinned[string.sub(all[i], 1, 32)] = true end
      end
    end
  end
  return pinned[digest]
end
-- A lease on a chunk until then, or for longer where it has one.
local function hold(digest, lease, expires, now)
  if tonumber(redis.call('HGET', pins, digest .. lease) or '0') >= expires or expires <= now then return end
  redis.call('HSET', pins, digest .. lease, string.format('%.0f', expires))
  if redis.call('PTTL', pins) < expires - now then redis.call('PEXPIRE', pins, expires - now) end
end
-- A chunk that nothing holds leaves under a lease: what is before it is protected by its parent from now on. Returns
-- the leases for a parent in another bucket: each 16 bytes, and 16 digits of when it ends.
local function move_pins(digest, parent, now)
  local all, away = redis.call('HGETALL', pins), {}
  for i = 1, #all, 2 do
    if #all[i] > 32 and string.sub(all[i], 1, 32) == digest then
      local lease, expires = string.sub(all[i], 33), tonumber(all[i + 1])
      redis.call('HDEL', pins, all[i])
      if parent ~= '' then hold(parent, lease, expires, now)
      else away[#away + 1] = lease .. string.format('%016.0f', expires) end
    end
  end
  pinned = nil
  return table.concat(away)
end
local outside = {}     -- parents in other buckets that lost a child: key, bucket, leases that move there, key, ...
-- Take an entry out, and then each of its ancestors here that has neither a holder nor a child.
local function remove(digest, now)
  while digest do
    local old = redis.call('HGET', key, digest)
    local about = redis.call('HGET', key, digest .. 'g')
    redis.call('HDEL', key, digest, digest .. 'c', digest .. 'g')
    count = count - 1
    if old ~= uniform then mixed = mixed - 1 end
    for name in string.gmatch(old, '[^,]+') do note(name, digest, about, -1) end
    local parent, elsewhere = string.sub(about, 9, 40), string.sub(about, 41, 72)
    local leases = is_pinned(digest, now) and move_pins(digest, elsewhere == '' and parent or '', now) or ''
    digest = nil
    if elsewhere ~= '' then
      for _, each in ipairs({parent, elsewhere, leases}) do outside[#outside + 1] = each end
    elseif parent ~= '' then
      local left = redis.call('HINCRBY', key, parent .. 'c', -1)
      if left <= 0 and redis.call('HGET', key, parent) == '' then digest = parent end
    end
  end
end
local function save()
  if mixed == count and count > 0 then       -- nothing has the old common placement: count again with a new one
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
  for name, each in pairs(changed) do
    local total, digest = string.match(redis.call('HGET', listings, name) or '0:0', '(%d+):(%d+)')
    local sum = (tonumber(digest) + each[2]) % 281474976710656
    redis.call('HSET', listings, name, string.format('%d:%.0f', tonumber(total) + each[1], sum))
  end
end
"""

# ARGV: 1 node, 2 (digest .. parent) packed; the parent is 32 zero bytes for none, 3 generation of new entries (8
# bytes), 4 the bucket of the first one's parent, where that is another one. Returns for each 9 bytes: "1" indexed, "2"
# indexed and new, "0" refused (its parent is not indexed, or its object is being deleted); then the generation.
REGISTER: Final = (
    _BUCKET
    + """
local node, records, fresh, elsewhere, marks = ARGV[1], ARGV[2], ARGV[3], ARGV[4], {}
local none = string.rep('\\0', 32)
for at = 1, #records, 64 do
  local digest, parent = string.sub(records, at, at + 31), string.sub(records, at + 32, at + 63)
  local old = redis.call('HGET', key, digest)
  local inside = parent ~= none and not (at == 1 and elsewhere ~= '')
  local refused = inside and not old and redis.call('HEXISTS', key, parent) == 0
  if node == '@object' then
    local object = redis.call('HGET', objects, digest)
    if object and string.sub(object, 1, 1) == '!' then refused = true
    elseif object and not refused then redis.call('HDEL', objects, digest) end
  end
  if refused then marks[#marks + 1] = '0' .. string.rep('\\0', 8)
  else
    if not old then
      local about = fresh
      if inside then about = fresh .. parent elseif parent ~= none then about = fresh .. parent .. elsewhere end
      redis.call('HSET', key, digest .. 'g', about)
      if inside then redis.call('HINCRBY', key, parent .. 'c', 1) end
    end
    local about = redis.call('HGET', key, digest .. 'g')
    if not old or not listed(old, node) then
      place(digest, (old and old ~= '') and (old .. ',' .. node) or node)
      note(node, digest, about, 1)
    end
    marks[#marks + 1] = (old and '1' or '2') .. string.sub(about, 1, 8)
  end
end
save()
return table.concat(marks)
"""
)

# ARGV: 1 node, 2 digests packed, 3 now in ms, 4 "1": only where the object tier is listed too, 5 only where so many
# other nodes are. The node holds these no more; an entry without holder and child is removed. Returns a mask, "1" where
# the node is not listed now, then parents in other buckets that lost a child.
UNREGISTER: Final = (
    _BUCKET
    + """
local node, digests, now, mask = ARGV[1], ARGV[2], tonumber(ARGV[3]), {}
for at = 1, #digests, 32 do
  local digest = string.sub(digests, at, at + 31)
  local old = redis.call('HGET', key, digest)
  local others = 0
  for name in string.gmatch(old or '', '[^,]+') do
    if name ~= node and name ~= '@object' then others = others + 1 end
  end
  local stays = ARGV[4] == '1' and not listed(old or '', '@object') or others < tonumber(ARGV[5])
  if not stays and old and listed(old, node) then
    place(digest, without(old, node))
    note(node, digest, redis.call('HGET', key, digest .. 'g'), -1)
  end
  mask[#mask + 1] = stays and '0' or '1'
  if old and redis.call('HGET', key, digest) == '' and children(digest) <= 0 then remove(digest, now) end
end
save()
return {table.concat(mask), unpack(outside)}
"""
)

# ARGV: 1 now in ms, 2 digests packed, the deepest chunk first, 3 when to delete objects. Removes those that no indexed
# chunk extends and no lease pins. Returns how many parents in other buckets follow, these, then for each chunk its
# generation and placement if it was removed, "kept" if it was not, "absent" if it was not indexed.
EVICT: Final = (
    _BUCKET
    + """
local now, digests, removed = tonumber(ARGV[1]), ARGV[2], {}
for at = 1, #digests, 32 do
  local digest = string.sub(digests, at, at + 31)
  local old = redis.call('HGET', key, digest)
  if not old then removed[#removed + 1] = 'absent'
  elseif children(digest) > 0 or is_pinned(digest, now) then removed[#removed + 1] = 'kept'
  else
    removed[#removed + 1] = string.sub(redis.call('HGET', key, digest .. 'g'), 1, 8) .. old
    if listed(old, '@object') then redis.call('HSET', objects, digest, ARGV[3]) end
    remove(digest, now)
  end
end
save()
local answer = {#outside, unpack(outside)}
for i = 1, #removed do answer[#answer + 1] = removed[i] end
return answer
"""
)

# ARGV: 1 digest, 2 change, 3 now in ms, 4 leases that the child had, as `move_pins` packs them. Counts a child in
# another bucket. Returns "0" if the chunk is not indexed, else "1" and, if it went because it has neither a holder nor
# a child any more, parents in other buckets.
COUNT_CHILD: Final = (
    _BUCKET
    + """
local digest, now = ARGV[1], tonumber(ARGV[3])
if redis.call('HEXISTS', key, digest) == 0 then return {'0'} end
for at = 1, #ARGV[4], 32 do
  hold(digest, string.sub(ARGV[4], at, at + 15), tonumber(string.sub(ARGV[4], at + 16, at + 31)), now)
end
local left = redis.call('HINCRBY', key, digest .. 'c', ARGV[2])
if left <= 0 and redis.call('HGET', key, digest) == '' then
  remove(digest, now)
  save()
end
return {'1', unpack(outside)}
"""
)

# ARGV: 1 digests packed, 2 generations (8 bytes each) packed. Lists the object tier in these very entries. Returns a
# mask: "1" listed, "0" there is no such entry, "!" the object is being deleted.
ADD_OBJECTS: Final = (
    _BUCKET
    + """
local digests, generations, mask = ARGV[1], ARGV[2], {}
for i = 0, #digests / 32 - 1 do
  local digest, wanted = string.sub(digests, i * 32 + 1, i * 32 + 32), string.sub(generations, i * 8 + 1, i * 8 + 8)
  local old = redis.call('HGET', key, digest)
  local object = redis.call('HGET', objects, digest)
  if object and string.sub(object, 1, 1) == '!' then mask[#mask + 1] = '!'
  elseif not old or string.sub(redis.call('HGET', key, digest .. 'g'), 1, 8) ~= wanted then mask[#mask + 1] = '0'
  else
    if object then redis.call('HDEL', objects, digest) end
    if not listed(old, '@object') then
      place(digest, old ~= '' and (old .. ',@object') or '@object')
      note('@object', digest, redis.call('HGET', key, digest .. 'g'), 1)
    end
    mask[#mask + 1] = '1'
  end
end
save()
return table.concat(mask)
"""
)

# ARGV: 1 digests packed, 2 when to delete them. Notes objects that no entry lists. Returns a mask: "1" noted,
# "2" listed already, "!" it is being deleted.
EXPECT: Final = (
    _BUCKET
    + """
local mask = {}
for at = 1, #ARGV[1], 32 do
  local digest = string.sub(ARGV[1], at, at + 31)
  local old, object = redis.call('HGET', key, digest), redis.call('HGET', objects, digest)
  if object and string.sub(object, 1, 1) == '!' then mask[#mask + 1] = '!'
  elseif old and listed(old, '@object') then mask[#mask + 1] = '2'
  else
    if not object or tonumber(object) < tonumber(ARGV[2]) then redis.call('HSET', objects, digest, ARGV[2]) end
    mask[#mask + 1] = '1'
  end
end
return table.concat(mask)
"""
)

# ARGV: 1 digests packed, 2 now in ms, 3 until when the deletion runs at the most. Returns a mask: "1" to be deleted,
# "0" not any more, "2" not yet, or claimed by another.
CLAIM: Final = (
    _BUCKET
    + """
local now, mask = tonumber(ARGV[2]), {}
for at = 1, #ARGV[1], 32 do
  local digest = string.sub(ARGV[1], at, at + 31)
  local object, old = redis.call('HGET', objects, digest), redis.call('HGET', key, digest)
  if object and old and listed(old, '@object') then
    redis.call('HDEL', objects, digest)
    object = false
  end
  if not object then mask[#mask + 1] = '0'
  elseif tonumber(string.match(object, '%d+')) > now then mask[#mask + 1] = '2'
  else
    redis.call('HSET', objects, digest, '!' .. ARGV[3])
    mask[#mask + 1] = '1'
  end
end
return table.concat(mask)
"""
)

# ARGV: 1 digests packed, 2 the claim. Their objects are deleted: they may be written again. Not if another one has
# claimed them since.
DELETED: Final = (
    _BUCKET
    + """
for at = 1, #ARGV[1], 32 do
  local digest = string.sub(ARGV[1], at, at + 31)
  if redis.call('HGET', objects, digest) == '!' .. ARGV[2] then redis.call('HDEL', objects, digest) end
end
return 1
"""
)

# KEYS: bucket, pins. ARGV: 1 digest, 2 lease id, 3 expiry in ms, 4 time to live of the pins in ms, 5 now in ms, 6 when
# to look for expired pins again. Returns 0 if the chunk is gone.
PIN: Final = (
    _PIN
    + """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
pin(KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
return 1
"""
)
