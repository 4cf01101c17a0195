"""What the Redis ledger does in one step on the server: each script checks who writes first.

A request that was not answered is sent again, and may be done late, or twice: each script is done
once. It returns a list of strings whose first says how it ended: `done`, or
`fenced` (and the epoch that fences), `lost` (the server holds another ledger, or none), `moved`
(and the stored position, which the writer's does not lead to), `held` (by whom).
"""

_CHECK = """
local held = redis.call('HMGET', KEYS[1], 'run_epoch', 'writer_epoch', 'position')
if held[1] ~= ARGV[1] then return {'lost', held[1] or 'nothing'} end
if held[2] ~= ARGV[2] then return {'fenced', held[2]} end
"""
"""KEYS: meta, ... ARGV: run_epoch, writer_epoch, ..."""

_CALL = """
local function call(command, key, first, last)
  for from = first, last, 1000 do
    redis.call(command, key, unpack(ARGV, from, math.min(from + 999, last)))
  end
end
"""
"""One command with many arguments costs the server, and its log, less than as many commands."""

ACQUIRE = """#!lua
local meta, active = KEYS[1], KEYS[2]
local format, run_epoch, holder, ttl_ms, gone, is_new, known_epoch, request = unpack(ARGV)
local stored = redis.call('HMGET', meta, 'format', 'run_epoch', 'acquired')
if stored[1] and stored[1] ~= format then return {'format', stored[1]} end
if stored[2] and stored[2] ~= run_epoch then return {'lost', stored[2]} end
if not stored[2] and is_new ~= '1' then return {'lost', 'nothing'} end
local other = redis.call('GET', active)
if other and other ~= holder and other ~= gone then return {'held', other} end
if not stored[2] then
  redis.call('HSET', meta, 'format', format, 'run_epoch', run_epoch, 'writer_epoch', 0,
    'position', 0, 'condensed', 0, 'removals', 0)
end
if stored[3] ~= request then
  local before = tonumber(redis.call('HGET', meta, 'writer_epoch'))
  local epoch = math.max(before, tonumber(known_epoch)) + 1
  redis.call('HSET', meta, 'writer_epoch', epoch, 'acquired', request)
  redis.call('SET', active, holder, 'PX', ttl_ms)
end
local found = redis.call('HMGET', meta, 'writer_epoch', 'position', 'condensed')
return {'done', found[1], found[2], found[3]}
"""
"""KEYS: meta, active. ARGV: format, run_epoch, holder, ttl_ms, gone (a holder that is known to be
dead), is_new ('1': nothing was acknowledged yet), known_epoch (raised also where the server was put
back), request (random). Returns epoch, position and how far of it is condensed."""

BEAT = f"""#!lua flags=allow-oom
{_CHECK}
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return {{'done'}}
"""
"""KEYS: meta, active. ARGV: run_epoch, writer_epoch, holder, ttl_ms."""

RESIGN = f"""#!lua flags=allow-oom
{_CHECK}
redis.call('DEL', KEYS[2])
return {{'done'}}
"""
"""KEYS: meta, active. ARGV: run_epoch, writer_epoch."""

APPEND = f"""#!lua
{_CHECK}{_CALL}
local position, before, rows = tonumber(held[3]), tonumber(ARGV[3]), tonumber(ARGV[4])
local there = position - before
if there < 0 or there > rows then return {{'moved', held[3]}} end
if there == rows then return {{'done'}} end
local first = 7
call('RPUSH', KEYS[2], first + there, first + rows - 1)
first = first + rows
local released, kept = tonumber(ARGV[5]), tonumber(ARGV[6])
call('HDEL', KEYS[3], first, first + released - 1)
first = first + released
call('HSET', KEYS[3], first, first + 2 * kept - 1)
redis.call('HSET', KEYS[1], 'position', before + rows)
if released > 0 then redis.call('HINCRBY', KEYS[1], 'removals', 1) end
return {{'done'}}
"""
"""KEYS: meta, journal, inline. ARGV: run_epoch, writer_epoch, position before, number of rows, of
released payloads, of kept ones; the rows; ids of released payloads; id and bytes of each kept one.

An append is tried again until it is answered, perhaps with more behind it: rows that are stored
already are this writer's, since nobody else can append under its epoch, and only the rest follows.
"""

STAGE = f"""#!lua
{_CHECK}{_CALL}
local before = tonumber(ARGV[3])
if before == 0 then redis.call('UNLINK', KEYS[2]) end
local there = redis.call('LLEN', KEYS[2]) - before
if there == #ARGV - 3 then return {{'done'}} end
if there ~= 0 then return {{'moved', held[3]}} end
call('RPUSH', KEYS[2], 4, #ARGV)
return {{'done'}}
"""
"""KEYS: meta, staged. ARGV: run_epoch, writer_epoch, rows of the head that came before, rows."""

CONDENSE = f"""#!lua
{_CHECK}
local condensed, upto = tonumber(redis.call('HGET', KEYS[1], 'condensed')), tonumber(ARGV[3])
local staged = redis.call('LLEN', KEYS[4])
if upto == condensed and staged == 0 then return {{'done'}} end
if upto < condensed or upto > tonumber(held[3]) or staged ~= tonumber(ARGV[4]) then
  return {{'moved', held[3]}}
end
redis.call('RENAME', KEYS[4], KEYS[3])
redis.call('LTRIM', KEYS[2], upto - condensed, -1)
redis.call('HSET', KEYS[1], 'condensed', upto)
redis.call('HINCRBY', KEYS[1], 'removals', 1)
return {{'done'}}
"""
"""KEYS: meta, journal, head, staged. ARGV: run_epoch, writer_epoch, position, rows of the new head,
which is staged, and stands for all up to the position from here on."""
