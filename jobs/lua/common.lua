-- What all scripts share; it stands before each of them. Key names, the server's clock, the table of moves,
-- and the two indexes that leasing searches instead of searching jobs:
--
--   <prefix>:model:<M>:ready   one member for each job with a task to lease, in the order of leasing: all scores
--                              are 0 and the member's text sorts. Its parts are priority (high first), live leases
--                              (few first), the turn of the last lease, at first of the creation (long ago first),
--                              job.
--   <prefix>:model:<M>:due     job -> when its next lease (or its rebuild) runs out
--
-- Both are functions of a job's own keys, brought up to date by index(). Every script may run twice.

local PREFIX = ARGV[1]

local TERMINAL = { completed = true, failed = true, expired = true, cancelled = true }
local DRAINING = { cancelling = true, expiring = true, failing = true }
local DRAIN_TO = { cancelled = 'cancelling', expired = 'expiring', failed = 'failing' }

-- The only moves there are. Draining goes nowhere but to finalizing, and an end nowhere. Any state but an end moves
-- to an end: the manifest that says so is the decision, and this state may be an older one that was restored.
local MOVES = {
  validating = ' in_progress finalizing cancelling expiring failing ',
  in_progress = ' finalizing cancelling expiring failing ',
  cancelling = ' finalizing ', expiring = ' finalizing ', failing = ' finalizing ', finalizing = '',
}
local function allowed(from, to)
  return MOVES[from] and (TERMINAL[to] or string.find(MOVES[from], ' ' .. to .. ' ', 1, true)) and true or false
end

local function root_of(job) return PREFIX .. ':{' .. job .. '}' end
local function model_key(model, name) return PREFIX .. ':model:' .. model .. ':' .. name end

-- Milliseconds by the server's clock: no two machines need to agree on the time.
local function clock()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function seconds(ms) return string.format('%.3f', ms / 1000) end
local function whole(n) return string.format('%.0f', n) end

local function get(root, field) return redis.call('HGET', root, field) or '' end
local function exists(root) return redis.call('EXISTS', root) == 1 end

-- Events are for people and programs that watch: capped, and never read by the protocol itself.
local function event(root, kind, ...)
  redis.call('XADD', root .. ':events', 'MAXLEN', '~', 1000, '*', 'kind', kind, ...)
end

local function touch(root, now, ...) redis.call('HSET', root, 'updated_at', seconds(now), ...) end

-- Moves a job if the table allows it; a job that is already there has moved.
local function move(root, to, now)
  local from = get(root, 'state')
  if from == to then return true end
  if not allowed(from, to) then return false end
  touch(root, now, 'state', to)
  event(root, 'state', 'state', to)
  return true
end

-- Tasks that wait, in the order of a job's life. Kinds never mix for long: no shard before the plan, no finalize
-- before the last commit.
local function place_of(task)
  if task == 'finalize' then return 0 end
  if task == 'plan' then return 1 end
  return 2 + tonumber(string.sub(task, 7))
end
local FIRST_SHARD = 2

local function index(job)
  local root = root_of(job)
  local m = redis.call('HMGET', root .. ':meta', 'model', 'priority', 'max_shards', 'stop', 'hold_until', 'turn', 'ready')
  if not m[1] then return end
  local ready, due = model_key(m[1], 'ready'), model_key(m[1], 'due')
  local entry, limit = '', tonumber(m[5])
  if limit == 0 then
    local head = redis.call('ZRANGE', root .. ':pending', 0, 0, 'WITHSCORES')
    local live = redis.call('ZCARD', root .. ':leases')
    local first = redis.call('ZRANGE', root .. ':leases', 0, 0, 'WITHSCORES')
    limit = tonumber(first[2] or 0)
    -- The cap is on what the engines do for one job; a shard of a stopped job costs them nothing.
    local cap = tonumber(m[3])
    if head[1] and (cap == 0 or live < cap or m[4] ~= '' or tonumber(head[2]) < FIRST_SHARD) then
      entry = string.format('%07d:%06d:%015.0f:%s', 1000000 - tonumber(m[2]), live, tonumber(m[6]), job)
    end
  end
  if entry ~= m[7] then
    if m[7] ~= '' then redis.call('ZREM', ready, m[7]) end
    if entry ~= '' then redis.call('ZADD', ready, 0, entry) end
    redis.call('HSET', root .. ':meta', 'ready', entry)
  end
  if limit > 0 then redis.call('ZADD', due, limit, job) else redis.call('ZREM', due, job) end
end

-- Out of everything that leasing looks at; the job's own keys stay.
local function retire(job)
  local root = root_of(job)
  local m = redis.call('HMGET', root .. ':meta', 'model', 'ready')
  if not m[1] then return end
  redis.call('ZREM', model_key(m[1], 'ready'), m[2])
  redis.call('ZREM', model_key(m[1], 'due'), job)
  redis.call('ZREM', PREFIX .. ':deadlines', job)
  redis.call('SREM', model_key(m[1], 'jobs'), job)
  redis.call('HSET', root .. ':meta', 'ready', '')
  if redis.call('SCARD', model_key(m[1], 'jobs')) == 0 then
    redis.call('SREM', PREFIX .. ':models', m[1])
    redis.call('DEL', model_key(m[1], 'turn'))
  end
end

-- The keys of a job that only a running one needs.
local function wipe(root)
  -- Segments of shards whose commit this state never heard of (it was restored from an older copy, say).
  for _, shard in ipairs(redis.call('HKEYS', root .. ':ledger')) do redis.call('DEL', root .. ':segments:' .. shard) end
  for _, key in ipairs({ 'pending', 'leases', 'holders', 'fences', 'attempts', 'strikes', 'trials', 'ledger', 'running' }) do
    redis.call('DEL', root .. ':' .. key)
  end
end

-- When this server started. Leases that ran out while it was down could not be renewed, so a restart gives each
-- of them one more ttl. The uptime is cut to seconds, which errs on the side of waiting.
local function boot(now)
  return now - 1000 * tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)'))
end

-- Leases that ran out go back to pending. The holder's record stays: while nobody has taken the task, its holder
-- may still renew, seal and commit; whoever takes it finds in the record whether the lease left anything behind.
local function sweep(model, now)
  local jobs = redis.call('ZRANGEBYSCORE', model_key(model, 'due'), '-inf', now, 'LIMIT', 0, 16)
  if #jobs == 0 then return end
  local started = boot(now)
  for _, job in ipairs(jobs) do
    local root = root_of(job)
    redis.call('HSET', root .. ':meta', 'hold_until', '0')
    for _, task in ipairs(redis.call('ZRANGEBYSCORE', root .. ':leases', '-inf', now, 'LIMIT', 0, 64)) do
      local holder = redis.call('HGET', root .. ':holders', task)
      local spared = started + (holder and cjson.decode(holder).ttl or 0)
      if spared > now then
        redis.call('ZADD', root .. ':leases', spared, task)
      else
        redis.call('ZREM', root .. ':leases', task)
        redis.call('ZADD', root .. ':pending', place_of(task), task)
      end
    end
    index(job)
  end
end

-- The holder's record if `fence` is its; nil when the task was taken over, ended or never leased.
local function held(root, task, fence)
  local text = redis.call('HGET', root .. ':holders', task)
  local holder = text and cjson.decode(text)
  if holder and holder.fence == fence then return holder end
  return nil
end

local function forget(root, task)
  redis.call('ZREM', root .. ':pending', task)
  redis.call('ZREM', root .. ':leases', task)
  redis.call('HDEL', root .. ':holders', task)
end

-- A fault that somebody can mend is no state: it is a sentence, until work on the job succeeds again. `by` tells what
-- ends it: a lease ends 'nobody' and 'refusal', any success ends 'worker'. Refused workers ask again every second, each
-- with a sentence of its own: that is worth one event.
local function block(root, reason, by)
  if get(root, 'blocked_reason') == reason then return end
  local before = get(root .. ':meta', 'blocked_by')
  redis.call('HSET', root, 'blocked_reason', reason)
  redis.call('HSET', root .. ':meta', 'blocked_by', by)
  if by ~= 'refusal' or before ~= by then event(root, 'blocked', 'reason', reason) end
end

local function unblock(root)
  if get(root, 'blocked_reason') == '' then return end
  redis.call('HSET', root, 'blocked_reason', '')
  redis.call('HSET', root .. ':meta', 'blocked_by', '')
  event(root, 'unblocked')
end

-- The ledger: shard -> [completed, failed, prompt, completion, cached tokens, rows]. Totals are absolute; what the
-- job's counters get is the difference, and never a negative one. Were a row counted as completed and later as
-- failed (its segment was lost, say), its first count stands until the manifest's sums replace all of them.
local COUNTERS = { 'completed', 'failed', 'prompt_tokens', 'completion_tokens', 'cached_tokens' }
local function account(root, shard, totals)
  local text = redis.call('HGET', root .. ':ledger', shard)
  if not text then return false end
  local old = cjson.decode(text)
  local rows = old[6]
  local new = {}
  new[1] = math.max(old[1], math.min(totals[1], rows - old[2]))
  new[2] = math.max(old[2], math.min(totals[2], rows - new[1]))
  for i = 3, 5 do new[i] = math.max(old[i], totals[i]) end
  new[6] = rows
  for i, name in ipairs(COUNTERS) do
    if new[i] > old[i] then redis.call('HINCRBY', root, name, whole(new[i] - old[i])) end
  end
  redis.call('HSET', root .. ':ledger', shard, cjson.encode(new))
  return true
end

local function numbers(from, count)
  local read = {}
  for i = 1, count do read[i] = tonumber(ARGV[from + i - 1]) end
  return read
end

local IDLE = { 'rows_running', '0', 'workers_active', '0', 'tokens_per_second', '0', 'eta_seconds', '' }

-- All shards are in: one task is left, and no rows are running any more.
local function start_finalize(job, root, now)
  if not move(root, 'finalizing', now) then return end
  touch(root, now, unpack(IDLE))
  redis.call('DEL', root .. ':running')
  redis.call('ZREM', PREFIX .. ':deadlines', job)
  redis.call('ZADD', root .. ':pending', place_of('finalize'), 'finalize')
end
