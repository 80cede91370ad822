"""The scripts that Redis runs atomically, in Lua.

Keys, after a prefix; their parts are quoted, so that a ":" is always a separator:

    v:namespace:group:digest   an entry              l:namespace:group:digest   its lease's holder
    g:namespace:group          sorted set: "namespace:group:digest" of the group's entries and leases, by when they end
    n:namespace                the same of all groups              a   sorted set: namespaces, by when their last entry ends
    e                          hash: `now`, the epoch; `floor`, the first epoch known here; `marks`, the size of x; `longest`, in ms, the
                               longest life of an entry
    x                          sorted set: the digests of erased scopes (a group, a namespace, everything), by the epoch that began then

An epoch begins with each erasure; its number is the microseconds since 1970, or one more than the last. An entry carries the epoch in which
its computation began, and is neither taken in nor read where a later erasure covers it, even where Redis has evicted the set by which the
entry would be found. `e` and `x` have no time to live, so that a policy `volatile-...` never evicts them; a Redis that lost either begins a
new epoch, and no entry of an earlier one counts. An erasure is remembered for as long as an entry from before may live, and until the next
entry or erasure; where Redis has no room for one, the client deletes `x`, or `e` where there is no `x`.
"""

KEEP_ERASURES_MS = 3_600_000
"""The longest time that a computation takes."""

_COMMON = f"""
local prefix = KEYS[1]
local e, x = prefix .. 'e', prefix .. 'x'
local clock = redis.call('TIME')
local now_us, now_ms = clock[1] * 1000000 + clock[2], clock[1] * 1000 + math.floor(clock[2] / 1000)
local function state()
  local known = redis.call('HMGET', e, 'now', 'floor', 'marks')
  if known[1] and tonumber(known[3]) == redis.call('ZCARD', x) then return known[1], tonumber(known[2]) end
  local now = string.format('%.0f', math.max(now_us, tonumber(known[1] or 0) + 1))
  redis.call('DEL', x)
  redis.call('HSET', e, 'now', now, 'floor', now, 'marks', 0)
  return now, tonumber(now)
end
local now, floor = state()
local function admits(began, scope, last)
  if began < floor then return false end
  if began >= tonumber(now) then return true end
  for number = scope, last do
    local erased = redis.call('ZSCORE', x, ARGV[number])
    if erased and began < tonumber(erased) then return false end
  end
  return true
end
local function entry(name, scope, last)
  local raw = redis.call('GET', prefix .. 'v:' .. name)
  if not raw or #raw < 50 or string.byte(raw, 1) ~= 3 then return false end
  return admits(struct.unpack('<I8', raw, 42), scope, last) and raw
end
local function index(set, member, at_ms)
  redis.call('ZREMRANGEBYSCORE', set, '-inf', now_ms)
  local known = redis.call('ZSCORE', set, member)
  if not known or tonumber(known) < at_ms then redis.call('ZADD', set, at_ms, member) end
  local last = redis.call('ZRANGE', set, -1, -1, 'WITHSCORES')
  redis.call('PEXPIREAT', set, string.format('%.0f', tonumber(last[2]) + 1000))
end
local function forget_old_erasures()
  local longest_ms = {KEEP_ERASURES_MS} + tonumber(redis.call('HGET', e, 'longest') or 0)
  local last = redis.call('ZREVRANGEBYSCORE', x, now_us - 1000 * longest_ms, '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not last[2] then return end
  floor = math.max(floor, tonumber(last[2]))
  redis.call('ZREMRANGEBYSCORE', x, '-inf', last[2])
  redis.call('HSET', e, 'floor', string.format('%.0f', floor), 'marks', redis.call('ZCARD', x))
end
"""

READ = (
    _COMMON
    + """
-- for each entry its name and the digests of the three erasures it may be of -> the epoch, and each entry or false
local found = {now}
for name = 1, #ARGV, 4 do found[#found + 1] = entry(ARGV[name], name + 1, name + 3) end
return found
"""
)

PUT = (
    _COMMON
    + """
-- namespace, group, digest, raw entry, milliseconds to live, epoch, digest of each erasure it may be of
-- -> 1: taken in, 0: refused, 2: left out, as it is degraded and a better one is kept
local namespace, group, name = ARGV[1], ARGV[2], ARGV[1] .. ':' .. ARGV[2] .. ':' .. ARGV[3]
if not admits(tonumber(ARGV[6]), 7, 9) then return 0 end
local kept = string.byte(ARGV[4], 50) ~= 0 and entry(name, 7, 9)
if kept and struct.unpack('<d', kept, 10) > struct.unpack('<d', ARGV[4], 10) then
  redis.call('DEL', prefix .. 'l:' .. name)
  return 2
end
if tonumber(ARGV[5]) > tonumber(redis.call('HGET', e, 'longest') or 0) then redis.call('HSET', e, 'longest', ARGV[5]) end
local at_ms = now_ms + ARGV[5]
redis.call('SET', prefix .. 'v:' .. name, ARGV[4], 'PX', ARGV[5])
redis.call('DEL', prefix .. 'l:' .. name)
index(prefix .. 'g:' .. namespace .. ':' .. group, name, at_ms)
index(prefix .. 'n:' .. namespace, name, at_ms)
index(prefix .. 'a', namespace, at_ms)
forget_old_erasures()
return 1
"""
)

LEASE = (
    _COMMON
    + """
-- namespace, group, digest, holder, milliseconds, newer than, digest of each erasure it may be of
-- -> {'entry', raw} | {'granted', epoch} | {'held', epoch, milliseconds}
local namespace, group, name = ARGV[1], ARGV[2], ARGV[1] .. ':' .. ARGV[2] .. ':' .. ARGV[3]
local raw = entry(name, 7, 9)
if raw and struct.unpack('<d', raw, 2) > tonumber(ARGV[6]) then return {'entry', raw} end
local lease = prefix .. 'l:' .. name
local holder = redis.call('GET', lease)
if holder and holder ~= ARGV[4] then return {'held', now, redis.call('PTTL', lease)} end
redis.call('SET', lease, ARGV[4], 'PX', ARGV[5])
index(prefix .. 'g:' .. namespace .. ':' .. group, name, now_ms + ARGV[5])
index(prefix .. 'n:' .. namespace, name, now_ms + ARGV[5])
index(prefix .. 'a', namespace, now_ms + ARGV[5])
return {'granted', now}
"""
)


WAIT = (
    _COMMON
    + """
-- an entry's name and the digests of the three erasures it may be of -> the entry or false, 1 where its lease is held
return {entry(ARGV[1], 2, 4), redis.call('EXISTS', prefix .. 'l:' .. ARGV[1])}
"""
)

RELEASE = """
-- the lease's key, holder
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

ERASE = (
    _COMMON
    + """
-- digest of what is erased -> the new epoch
now = string.format('%.0f', math.max(now_us, tonumber(now) + 1))
redis.call('ZADD', x, now, ARGV[1])
redis.call('HSET', e, 'now', now, 'marks', redis.call('ZCARD', x))
forget_old_erasures()
return now
"""
)

DROP = (
    _COMMON
    + """
-- how many of its first names to drop of each set, sets g or n -> how many entries there were
local dropped = 0
for set = 2, #ARGV do
  for _, name in ipairs(redis.call('ZRANGE', prefix .. ARGV[set], 0, ARGV[1] - 1)) do
    dropped = dropped + redis.call('UNLINK', prefix .. 'v:' .. name)
    redis.call('DEL', prefix .. 'l:' .. name)
    redis.call('ZREM', prefix .. 'g:' .. string.match(name, '^([^:]*:[^:]*):'), name)
    redis.call('ZREM', prefix .. 'n:' .. string.match(name, '^([^:]*):'), name)
  end
end
return dropped
"""
)
