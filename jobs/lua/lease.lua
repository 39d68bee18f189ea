-- Leases the best task of a model to a worker. ARGV: prefix, model, worker, nonce, ttl ms, fingerprint ("": holds no
-- model), context (0: no limit known), kinds (",plan,shard,"), job ("": any), starved ("1": only jobs without a lease), then jobs
-- that this worker leaves alone for now.
-- Twice: the same nonce gets the same lease, made fresh, as long as nobody else has taken the task.
-- Costs O(log n) in jobs and tasks, plus one look at each job that is refused before one is found.
local model, worker, nonce, ttl = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local fingerprint, context, kinds, only, starved = ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9], ARGV[10] == '1'
local avoided = {}
for i = 11, #ARGV do avoided[ARGV[i]] = true end
local now = clock()
local nonce_key = PREFIX .. ':nonce:' .. nonce

local function about(job)
  local v = redis.call('HMGET', root_of(job) .. ':meta', 'model', 'fingerprint', 'context', 'stop', 'epoch', 'blocked_by')
  return { model = v[1], fingerprint = v[2], context = v[3], stop = v[4], epoch = v[5], blocked_by = v[6] }
end

local function reply(job, task, fence, m)
  local root = root_of(job)
  local strikes = redis.call('HGET', root .. ':strikes', task) or '0'
  local attempt = redis.call('HGET', root .. ':attempts', task)
  local more = redis.call('ZCARD', model_key(model, 'ready')) > 0 and '1' or '0'
  return { 'lease', job, task, fence, m.epoch, get(root, 'state'), m.stop, strikes, attempt, more, m.fingerprint }
end

-- A lease is alive again from now on, wherever its task was.
local function extend(job, task)
  local root = root_of(job)
  redis.call('ZREM', root .. ':pending', task)
  redis.call('ZADD', root .. ':leases', now + ttl, task)
  index(job)
end

local function again()
  local seen = redis.call('GET', nonce_key)
  if not seen then return nil end
  local was = cjson.decode(seen)
  if not held(root_of(was.job), was.task, was.fence) then return { 'none' } end
  extend(was.job, was.task)
  return reply(was.job, was.task, was.fence, about(was.job))
end

-- Why this worker cannot run a shard that needs an engine, or nil.
local function refusal(m)
  if m.model ~= model then return 'the job runs on ' .. m.model end
  if fingerprint == '' then return 'it holds no model' end
  if m.fingerprint ~= '' and m.fingerprint ~= fingerprint then
    return 'it serves other weights (' .. fingerprint .. ') than the job began with (' .. m.fingerprint .. ')'
  end
  local need = tonumber(m.context)
  if need > 0 and context > 0 and context < need then
    return 'it holds a context of ' .. whole(context) .. ' tokens, the job declares ' .. whole(need)
  end
  return nil
end

-- The task to take from this job, and what is known of the job; or nil. A refusal is told where people look, unless
-- others work on the job.
local function choose(job)
  if avoided[job] then return nil end
  local root = root_of(job)
  local task = redis.call('ZRANGE', root .. ':pending', 0, 0)[1]
  local kind = task and string.match(task, '^%a+')
  if not task or not string.find(kinds, ',' .. kind .. ',', 1, true) then return nil end
  local m = about(job)
  if kind ~= 'shard' or m.stop ~= '' then return task, m end
  local why = refusal(m)
  if not why then
    if m.fingerprint == '' then
      redis.call('HSET', root .. ':meta', 'fingerprint', fingerprint)
      m.fingerprint = fingerprint
    end
    return task, m
  end
  if fingerprint ~= '' and redis.call('ZCARD', root .. ':leases') == 0 then
    if m.blocked_by ~= 'worker' then block(root, 'worker ' .. worker .. ' is refused: ' .. why, 'refusal') end
  end
  return nil
end

local function strike(root, task)
  local text = redis.call('HGET', root .. ':holders', task)
  if not text then return end
  local last = cjson.decode(text)
  if last.sealed == 0 then redis.call('HINCRBY', root .. ':strikes', task, 1) end
  event(root, 'lost', 'task', task, 'worker', last.worker, 'fence', last.fence)
end

local function take(job, task, m)
  local root = root_of(job)
  strike(root, task)
  -- Strictly growing within an epoch, and across a server that forgot the last second: the clock went on.
  local n = math.max(tonumber(redis.call('HGET', root .. ':fences', task) or 0) + 1, now)
  local fence = string.format('%06d.%015.0f', tonumber(m.epoch), n)
  local holder = { fence = fence, nonce = nonce, worker = worker, ttl = ttl, sealed = 0 }
  redis.call('HSET', root .. ':fences', task, whole(n))
  redis.call('HSET', root .. ':holders', task, cjson.encode(holder))
  redis.call('HINCRBY', root .. ':attempts', task, 1)
  redis.call('HSET', root .. ':meta', 'turn', redis.call('INCR', model_key(m.model, 'turn')))
  if m.blocked_by == 'nobody' or m.blocked_by == 'refusal' then unblock(root) end
  if get(root, 'started_at') == '' then redis.call('HSET', root, 'started_at', seconds(now)) end
  touch(root, now)
  extend(job, task)
  redis.call('SET', nonce_key, cjson.encode({ job = job, task = task, fence = fence }), 'PX', ttl + 60000)
  return reply(job, task, fence, m)
end

local function one()
  local entry = redis.call('HGET', root_of(only) .. ':meta', 'ready')
  if not entry or entry == '' then return nil end
  if starved and redis.call('ZCARD', root_of(only) .. ':leases') > 0 then return nil end
  local task, m = choose(only)
  return task and take(only, task, m)
end

-- Walks the ready jobs in order. Past the first job of a priority that has a lease, all others of that priority
-- have one too, so the search for a starved job goes on at the next priority.
local function any()
  local ready, from = model_key(model, 'ready'), 0
  while true do
    local entry = redis.call('ZRANGE', ready, from, from)[1]
    if not entry then return nil end
    if starved and string.sub(entry, 9, 14) ~= '000000' then
      from = redis.call('ZLEXCOUNT', ready, '-', '(' .. string.sub(entry, 1, 7) .. ';')
    else
      local job = string.sub(entry, 32)
      local task, m = choose(job)
      if task then return take(job, task, m) end
      from = from + 1
    end
  end
end

local known = again()
if known then return known end
if only ~= '' then
  sweep(redis.call('HGET', root_of(only) .. ':meta', 'model') or model, now)
  return one() or { 'none' }
end
sweep(model, now)
return any() or { 'none' }
