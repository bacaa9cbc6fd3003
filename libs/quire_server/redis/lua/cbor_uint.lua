-- The number of CBOR that begins at a byte, counted from 1.
local function uint(packed, at)
    local kind = string.byte(packed, at)
    if kind < 24 then return kind end
    local value = 0
    for each = at + 1, at + 2 ^ (kind - 24) do value = value * 256 + string.byte(packed, each) end
    return value
end
