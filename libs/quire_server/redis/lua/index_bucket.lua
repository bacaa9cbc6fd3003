-- What the scripts that change a bucket share (`open`, `save`).
--
-- A page stays as it is packed but for its lists, which are as long as it has runs of equal entries. An entry is found
-- anew after each removal: `f` fingerprint, `page` and `row` where it lies, `g` generation, `n` holders.
local rows_max = 256  -- chunks of a page
local slot_load = 64  -- fields of a slot of the directory, in mean: Redis packs hashes of up to 128
local cell, pins, objects, listings, drops, links, due, hidden
local pages, root, changed, added, pinned  -- `added`: pages of new entries by fingerprint
local quick, finish  -- where a script has them (`index_each`)
-- Parents in other buckets that lost a child: fingerprint, bucket and name of the link, child, leases that move there, ...
local outside
local function new_page(id)
  local page = {id = id, count = 0, prints = '', added = {}, rows = {}, spans = {}, links = {}, extra = {}}
  pages[id] = page
  return page
end
local function load(id)
  if pages[id] then return pages[id] end
  local raw = redis.call('GET', page_key(cell, id))
  if not raw and id > 0 then return nil end
  local page = new_page(id)
  if not raw then page.total, page.slots, page.last = 0, 0, 0; return page end
  page.count = count_of(raw)
  page.prints = sub(raw, 3, 2 + 8 * page.count)
  page.spans, page.links, page.extra, page.total, page.slots, page.last = unpack(about(raw))
  return page
end
-- Begin with the bucket whose first page has a key. Its other keys have the same tag and fingerprint (`slots.py`): pins,
-- objects, listings, drops (the name's beginning: a node's name follows), links to children in other buckets, objects
-- that are due, copies that their nodes hide.
local function open(page_key)
  local tag, bucket = sub(page_key, 9, 12), sub(page_key, 13)
  cell, pins, objects = page_key, 'quire:p:' .. tag .. bucket, 'quire:o:' .. tag .. bucket
  listings, drops, links = 'quire:l:' .. tag, 'quire:d:' .. tag, 'quire:c:' .. tag .. bucket
  due, hidden = 'quire:due:' .. tag, 'quire:h:' .. tag .. bucket
  pages, changed, added, pinned, outside, unpacked = {}, {}, {}, nil, {}, {}
  root = load(0)
end
local function insert(list, at, ...)
  for i = select('#', ...), 1, -1 do table.insert(list, at, (select(i, ...))) end
end
local function erase(list, at, count) for _ = 1, count do table.remove(list, at) end end
local function find_row(page, print)
  return page.rows[print] or row_among(page.prints, print, 1, #page.prints)
end
local function join(page)
  if #page.added > 0 then page.prints, page.added, page.rows = page.prints .. table.concat(page.added), {}, {} end
end
local function entry_of(print)
  local page = added[print] or root
  local row = find_row(page, print)
  if not row then
    local id = page_of(cell, root.slots, print)
    page = id and load(id)
    row = page and find_row(page, print)
  end
  if not row then return nil end
  local span = place_of(page.spans, 3, row)
  return {f = print, page = page, row = row, g = page.spans[span + 1], n = page.spans[span + 2]}
end
-- The fingerprint of an entry's parent, "" for none; where it is in another bucket, that one's and the link's name.
local function parent_of(entry)
  local page, link = entry.page, place_of(entry.page.links, 3, entry.row)
  if page.links[link] == entry.row then return page.links[link + 1], page.links[link + 2] end
  join(page)
  return sub(page.prints, 8 * entry.row - 15, 8 * entry.row - 8), ''
end
local function is_linked(page, row) return page.links[place_of(page.links, 3, row)] == row end
local function children(entry)
  local page, row = entry.page, entry.row
  local at = place_of(page.extra, 2, row)
  local next_one = row < page.count and not is_linked(page, row + 1) and 1 or 0
  return next_one + (page.extra[at] == row and page.extra[at + 1] or 0)
end
-- More or fewer children that do not lie behind it. Those in other buckets are counted as often as there are links to
-- them (`link`, `unlink`), in the same instant.
local function add_children(entry, more)
  local extra = entry.page.extra
  local at = place_of(extra, 2, entry.row)
  if extra[at] == entry.row then
    extra[at + 1] = extra[at + 1] + more
    if extra[at + 1] == 0 then erase(extra, at, 2) end
  else insert(extra, at + 2, entry.row, more) end
  entry.page.dirty = true
end
local function hold_by(entry, names)
  local spans, row, page = entry.page.spans, entry.row, entry.page
  if entry.n == names then return end
  local at = place_of(spans, 3, row)
  local first, stop, g, n = spans[at], spans[at + 3] or page.count + 1, spans[at + 1], spans[at + 2]
  if stop > row + 1 then insert(spans, at + 3, row + 1, g, n) end
  if first < row then at = at + 3; insert(spans, at, row, g, names) else spans[at + 2] = names end
  for _, each in ipairs({at + 3, at}) do  -- neighbours that are equal now are one
    if each > 1 and spans[each] and spans[each - 2] == spans[each + 1] and spans[each - 1] == spans[each + 2] then
      erase(spans, each, 3)
    end
  end
  entry.n = names
  page.dirty = true
end
local function note_page(print, id)
  root.beside = (root.beside or root.total - root.count) + 1
  if root.slots == 0 then root.slots = 1
  elseif root.beside > root.slots * slot_load then
    root.slots = root.slots + 1
    local level = 1
    while level * 2 < root.slots do level = level * 2 end
    local old = cell .. 'd' .. struct.pack('>I4', root.slots - 1 - level)
    local new = cell .. 'd' .. struct.pack('>I4', root.slots - 1)
    local all = redis.call('HGETALL', old)
    for i = 1, #all, 2 do
      if directory(cell, root.slots, all[i]) == new then
        redis.call('HSET', new, all[i], all[i + 1])
        redis.call('HDEL', old, all[i])
      end
    end
  end
  redis.call('HSET', directory(cell, root.slots, print), sub(print, 1, 5), id)
end
-- Index a chunk, near its parent if there is room; what is behind its parent has no link.
local function add(print, generation, parent, above, elsewhere)
  local page = parent and parent.page
  if not page or page.count >= rows_max then page = root.last == 0 and root or load(root.last) end
  if not page or page.count >= rows_max then
    root.last = root.last + 1
    page = new_page(root.last)
  end
  local row = page.count + 1
  if not parent or parent.page ~= page or parent.row ~= row - 1 then
    insert(page.links, #page.links + 1, row, above, elsewhere)
    if parent then add_children(parent, 1) end
  end
  local spans = page.spans
  if spans[#spans - 1] ~= generation or spans[#spans] ~= '' then insert(spans, #spans + 1, row, generation, '') end
  page.count, page.added[#page.added + 1], page.rows[print] = row, print, row
  added[print] = page
  if page.id > 0 then note_page(print, page.id) end
  root.total = root.total + 1
  page.dirty, root.dirty = true, true
  return {f = print, page = page, row = row, g = generation, n = ''}
end
local function six(bytes)
  local high, low = struct.unpack('>I2I4', bytes)
  return high * 4294967296 + low
end
local listing_modulus = 281474976710656  -- doubles are exact up to 2^53
local function count_in(changes, name, print, generation, sign)
  local each = changes[name] or {0, 0}
  each[1] = each[1] + sign
  each[2] = (each[2] + sign * (six(print) + six(generation))) % listing_modulus
  changes[name] = each
end
local function note(name, entry, sign) count_in(changed, name, entry.f, entry.g, sign) end
local function add_to_listing(listings, name, each)
  local total, digest = string.match(redis.call('HGET', listings, name) or '0:0', '(%d+):(%d+)')
  local sum = (tonumber(digest) + each[2]) % listing_modulus
  redis.call('HSET', listings, name, string.format('%d:%.0f', tonumber(total) + each[1], sum))
end
local function listed(placement, name) return find(',' .. placement .. ',', ',' .. name .. ',', 1, true) end
local function without(placement, name)
  local left = {}
  for each in string.gmatch(placement, '[^,]+') do if each ~= name then left[#left + 1] = each end end
  return table.concat(left, ',')
end
local function list(entry, name)
  hold_by(entry, entry.n == '' and name or entry.n .. ',' .. name)
  note(name, entry, 1)
end
local function unlist(entry, name)
  note(name, entry, -1)
  hold_by(entry, without(entry.n, name))
end
-- Copies that nodes hide: {node, generation of the entry that listed it, ...}.
local function hidden_of(print)
  local packed = redis.call('HGET', hidden, print)
  return packed and cmsgpack.unpack(packed) or {}
end
local function unhide(print, name)
  local nodes = hidden_of(print)
  for at = #nodes - 1, 1, -2 do if nodes[at] == name then erase(nodes, at, 2) end end
  if #nodes > 0 then redis.call('HSET', hidden, print, cmsgpack.pack(nodes)) else redis.call('HDEL', hidden, print) end
  return nodes
end
-- A node that hides a copy is to drop it if the chunk is evicted. The bucket's records go `ttl` ms after the last one.
local function hide(print, name, generation, ttl)
  local nodes = unhide(print, name)
  insert(nodes, #nodes + 1, name, generation)
  redis.call('HSET', hidden, print, cmsgpack.pack(nodes))
  redis.call('PEXPIRE', hidden, ttl)
end
local function is_pinned(print, now)
  if not pinned then
    pinned = {}
    local all = redis.call('HGETALL', pins)
    for i = 1, #all, 2 do
      if #all[i] > 8 then
        if tonumber(all[i + 1]) <= now then redis.call('HDEL', pins, all[i])
        else pinned[sub(all[i], 1, 8)] = true end
      end
    end
  end
  return pinned[print]
end
-- A lease on a chunk until then, or for longer where it has one.
local function hold(print, lease, expires, now)
  if tonumber(redis.call('HGET', pins, print .. lease) or '0') >= expires or expires <= now then return end
  redis.call('HSET', pins, print .. lease, string.format('%.0f', expires))
  if redis.call('PTTL', pins) < expires - now then redis.call('PEXPIRE', pins, expires - now) end
end
-- A chunk that nothing holds leaves under a lease: what is before it is protected by its parent from now on. Returns
-- the leases for a parent in another bucket: each 16 bytes, and 16 digits of when it ends.
local function move_pins(print, parent, now)
  local all, away = redis.call('HGETALL', pins), {}
  for i = 1, #all, 2 do
    if #all[i] > 8 and sub(all[i], 1, 8) == print then
      local lease, expires = sub(all[i], 9), tonumber(all[i + 1])
      redis.call('HDEL', pins, all[i])
      if parent ~= '' then hold(parent, lease, expires, now)
      else away[#away + 1] = lease .. string.format('%016.0f', expires) end
    end
  end
  pinned = nil
  return table.concat(away)
end
local function shift(list, stride, row)
  for at = 1, #list, stride do if list[at] > row then list[at] = list[at] - 1 end end
end
local function take_out(entry)
  local page, row = entry.page, entry.row
  added[entry.f] = nil
  join(page)
  page.prints = sub(page.prints, 1, 8 * row - 8) .. sub(page.prints, 8 * row + 1)
  local span, link, extra = place_of(page.spans, 3, row), place_of(page.links, 3, row), place_of(page.extra, 2, row)
  if (page.spans[span + 3] or page.count + 1) - page.spans[span] == 1 then erase(page.spans, span, 3) end
  if page.links[link] == row then erase(page.links, link, 3) end
  if page.extra[extra] == row then erase(page.extra, extra, 2) end
  shift(page.spans, 3, row)
  shift(page.links, 3, row)
  shift(page.extra, 2, row)
  page.count = page.count - 1
  page.dirty = true
  if page.id > 0 then
    root.beside = (root.beside or root.total - root.count) - 1
    redis.call('HDEL', directory(cell, root.slots, entry.f), sub(entry.f, 1, 5))
  end
  root.total, root.dirty = root.total - 1, true
end
-- Take an entry out, and then each of its ancestors here that has neither a holder nor a child.
local function remove(entry, now)
  while entry do
    local above, elsewhere = parent_of(entry)
    local behind = not is_linked(entry.page, entry.row)
    for name in string.gmatch(entry.n, '[^,]+') do note(name, entry, -1) end
    local leases = is_pinned(entry.f, now) and move_pins(entry.f, elsewhere == '' and above or '', now) or ''
    local gone = entry.f
    take_out(entry)
    entry = nil
    if elsewhere ~= '' then insert(outside, #outside + 1, above, elsewhere, gone, leases)
    elseif above ~= '' then
      local parent = entry_of(above)
      if parent then
        if not behind then add_children(parent, -1) end
        if parent.n == '' and children(parent) <= 0 then entry = parent end
      end
    end
  end
end
-- The first page last: while a Cluster moves the slot, a page that is not here yet ends the script before that.
local function save()
  local function write(page)
    if not page.dirty then return end
    join(page)
    local known = {page.spans, page.links, page.extra}
    if page == root then known[4], known[5], known[6] = page.total, page.slots, page.last end
    local key = page_key(cell, page.id)
    if page.count == 0 then redis.call('DEL', key)
    else redis.call('SET', key, struct.pack('>I2', page.count) .. page.prints .. cmsgpack.pack(known)) end
  end
  for id, page in pairs(pages) do if id > 0 then write(page) end end
  write(root)
  for name, each in pairs(changed) do add_to_listing(listings, name, each) end
end
