"""What Redis does in one step, in its own Lua.

Keys, after a prefix; parts are quoted, so that a ":" only ever separates:

    v:namespace:group:digest   an entry              l:namespace:group:digest   its lease's holder
    g:namespace:group          sorted set: "namespace:group:digest" of the group's entries and leases, by when they end
    n:namespace                the same of all groups              a   sorted set: namespaces, by when their last entry ends
    e                          hash: `now`, the epoch; `floor`, the first one known here
    x:digest      the epoch that the last erasure of a group, a namespace or everything began; its digest, so that it names no user

An epoch counts erasures, from the microseconds since 1970 at which `e` was first needed: a Redis that lost its data begins above every
epoch it gave out before. Erasures are remembered for as long as `KEEP_ERASURES_MS`; no computation takes that long.
"""

KEEP_ERASURES_MS = 3_600_000

_COMMON = f"""
local prefix = KEYS[1]
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function epoch()
  local now = redis.call('HGET', prefix .. 'e', 'now')
  if now then return now end
  now = string.format('%s%06d', clock[1], clock[2])
  redis.call('HSET', prefix .. 'e', 'now', now, 'floor', now)
  return now
end
local function fresh_until(raw)
  if #raw < 9 or string.byte(raw, 1) ~= 1 then return 0 end
  return (struct.unpack('<d', raw, 2))
end
local function index(set, member, at_ms)
  redis.call('ZREMRANGEBYSCORE', set, '-inf', now_ms)
  local known = redis.call('ZSCORE', set, member)
  if not known or tonumber(known) < at_ms then redis.call('ZADD', set, at_ms, member) end
  local last = redis.call('ZRANGE', set, -1, -1, 'WITHSCORES')
  redis.call('PEXPIREAT', set, string.format('%.0f', tonumber(last[2]) + 1000))
end
local keep_ms = {KEEP_ERASURES_MS}
"""

PUT = (
    _COMMON
    + """
-- namespace, group, digest, raw entry, milliseconds to live, epoch, digest of each erasure it may be of -> 1: taken in, 0: refused
local namespace, group, name = ARGV[1], ARGV[2], ARGV[1] .. ':' .. ARGV[2] .. ':' .. ARGV[3]
local began = tonumber(ARGV[6])
epoch()
if began < tonumber(redis.call('HGET', prefix .. 'e', 'floor')) then return 0 end
for scope = 7, #ARGV do
  local erased = redis.call('GET', prefix .. 'x:' .. ARGV[scope])
  if erased and began < tonumber(erased) then return 0 end
end
local at_ms = now_ms + ARGV[5]
redis.call('SET', prefix .. 'v:' .. name, ARGV[4], 'PX', ARGV[5])
redis.call('DEL', prefix .. 'l:' .. name)
index(prefix .. 'g:' .. namespace .. ':' .. group, name, at_ms)
index(prefix .. 'n:' .. namespace, name, at_ms)
index(prefix .. 'a', namespace, at_ms)
return 1
"""
)

LEASE = (
    _COMMON
    + """
-- namespace, group, digest, holder, milliseconds, newer than -> {'entry', raw} | {'granted', epoch} | {'held', epoch, milliseconds}
local namespace, group, name = ARGV[1], ARGV[2], ARGV[1] .. ':' .. ARGV[2] .. ':' .. ARGV[3]
local raw = redis.call('GET', prefix .. 'v:' .. name)
if raw and fresh_until(raw) > tonumber(ARGV[6]) then return {'entry', raw} end
local lease = prefix .. 'l:' .. name
local holder = redis.call('GET', lease)
if holder and holder ~= ARGV[4] then return {'held', epoch(), redis.call('PTTL', lease)} end
redis.call('SET', lease, ARGV[4], 'PX', ARGV[5])
index(prefix .. 'g:' .. namespace .. ':' .. group, name, now_ms + ARGV[5])
index(prefix .. 'n:' .. namespace, name, now_ms + ARGV[5])
index(prefix .. 'a', namespace, now_ms + ARGV[5])
return {'granted', epoch()}
"""
)

EPOCH = _COMMON + "return epoch()"

RELEASE = """
-- the lease's key, holder
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

ERASE = (
    _COMMON
    + """
-- digest of what is erased -> the new epoch
epoch()
redis.call('HINCRBY', prefix .. 'e', 'now', 1)
local now = redis.call('HGET', prefix .. 'e', 'now')
redis.call('SET', prefix .. 'x:' .. ARGV[1], now, 'PX', keep_ms)
return now
"""
)

DROP = (
    _COMMON
    + """
-- "namespace:group:digest" each -> how many entries there were
local dropped = 0
for _, name in ipairs(ARGV) do
  dropped = dropped + redis.call('UNLINK', prefix .. 'v:' .. name)
  redis.call('DEL', prefix .. 'l:' .. name)
  redis.call('ZREM', prefix .. 'g:' .. string.match(name, '^([^:]*:[^:]*):'), name)
  redis.call('ZREM', prefix .. 'n:' .. string.match(name, '^([^:]*):'), name)
end
return dropped
"""
)
