-- Which jobs wait for an engine with a model. ARGV: prefix, model, worker who asks, its fingerprint ("": it has never
-- loaded the model) and context (0: the same). Counts jobs whose next task is a shard that the asker would not be
-- refused; those of them that nobody holds a task of and that no other living worker with the model loaded (or
-- loading) could take; tells the highest priority; counts those of the unserved that no other living worker could
-- change to the model for; and other living workers with the model loaded (or loading). Looks at the first 256 jobs.
-- Twice: counts again.
local model, asker, fingerprint, context, now = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), clock()

-- A worker that is loading has no fingerprint yet, and is taken to suit.
local function suits(m, print, room)
  local need = tonumber(m[2] or 0)
  return (m[1] == '' or print == '' or m[1] == print) and (need == 0 or room == 0 or room >= need)
end

local others, able = {}, false
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', model_key(model, 'workers'), now, '+inf')) do
  local w = redis.call('HMGET', PREFIX .. ':worker:' .. worker, 'loaded', 'state', 'fingerprint', 'context')
  if worker ~= asker and (w[2] == 'ready' or w[2] == 'starting') then
    if w[1] == model then
      others[#others + 1] = { w[3] or '', tonumber(w[4] or 0) }
    else
      able = true
    end
  end
end

local function served(root, m)
  if redis.call('ZCARD', root .. ':leases') > 0 then return true end
  for _, other in ipairs(others) do
    if suits(m, other[1], other[2]) then return true end
  end
  return false
end

sweep(model, now)
local jobs, unserved, priority, alone = 0, 0, 0, 0
for _, entry in ipairs(redis.call('ZRANGE', model_key(model, 'ready'), 0, 255)) do
  local root = root_of(string.sub(entry, 32))
  local head = redis.call('ZRANGE', root .. ':pending', 0, 0, 'WITHSCORES')
  local m = redis.call('HMGET', root .. ':meta', 'fingerprint', 'context', 'stop', 'priority')
  if head[1] and tonumber(head[2]) >= FIRST_SHARD and m[3] == '' and suits(m, fingerprint, context) then
    jobs = jobs + 1
    if jobs == 1 then priority = tonumber(m[4]) end -- they come in the order of priority
    if not served(root, m) then
      unserved = unserved + 1
      if not able then alone = alone + 1 end
    end
  end
end
return { jobs, unserved, priority, alone, #others }
