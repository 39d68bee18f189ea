-- Adopts plan.json. ARGV: prefix, job, plan fence, total, failed, fingerprint, stopped reason, refused code, refused
-- message, shards as JSON [[number, rows], …]. No fence is asked for: the plan was decided in the store, and whoever
-- found it may say so. Twice: a job that has a plan keeps it, and every caller is told the same.
local job, root, meta, now = ARGV[2], KEYS[1], KEYS[1] .. ':meta', clock()
local failed = tonumber(ARGV[5])

if not exists(root) then return { 'unknown' } end
local state = get(root, 'state')
if get(meta, 'planned') ~= '' or TERMINAL[state] then return { 'ok', state } end

local function add_shards(shards)
  for from = 1, #shards, 1000 do
    local waiting, ledger = {}, {}
    for i = from, math.min(from + 999, #shards) do
      local number, rows = whole(shards[i][1]), whole(shards[i][2])
      waiting[#waiting + 1] = FIRST_SHARD + shards[i][1]
      waiting[#waiting + 1] = 'shard:' .. number
      ledger[#ledger + 1] = number
      ledger[#ledger + 1] = '[0,0,0,0,0,' .. rows .. ']'
    end
    redis.call('ZADD', root .. ':pending', unpack(waiting))
    redis.call('HSET', root .. ':ledger', unpack(ledger))
  end
end

forget(root, 'plan')
redis.call('HDEL', root .. ':strikes', 'plan')
redis.call('HSET', meta, 'planned', ARGV[3])
if ARGV[6] ~= '' then redis.call('HSET', meta, 'fingerprint', ARGV[6]) end
local shards = cjson.decode(ARGV[10])
add_shards(shards)
redis.call('HSET', root, 'total', ARGV[4], 'shards_total', #shards)
redis.call('HSET', root .. ':ledger', 'plan', '[0,0,0,0,0,' .. whole(failed) .. ']')
account(root, 'plan', { 0, failed, 0, 0, 0 })

-- The plan may know of a stop that this state has not heard of, or has forgotten.
if ARGV[7] ~= '' and get(meta, 'stop') == '' and move(root, DRAIN_TO[ARGV[7]], now) then
  redis.call('HSET', meta, 'stop', ARGV[7])
end
if ARGV[8] ~= '' then redis.call('HSET', root, 'error_code', ARGV[8], 'error_message', ARGV[9]) end
if #shards == 0 then
  start_finalize(job, root, now)
else
  move(root, 'in_progress', now)
end
unblock(root)
touch(root, now)
event(root, 'planned', 'total', ARGV[4], 'failed', ARGV[5], 'shards', #shards)
index(job)
return { 'ok', get(root, 'state') }
