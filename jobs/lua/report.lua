-- One worker's live figures of one job, and the job's from those of all that reported lately: a worker that died
-- drops out by itself. ARGV: prefix, job, worker, rows running, completion tokens/s, fresh ms. Twice: same figures.
local root, worker, now = KEYS[1], ARGV[3], clock()
local rows, speed, fresh = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local state = get(root, 'state')
if state == '' then return { 'unknown' } end
if TERMINAL[state] or state == 'finalizing' then return { 'ok', state } end
if rows == 0 and speed == 0 then
  redis.call('HDEL', root .. ':running', worker)
else
  redis.call('HSET', root .. ':running', worker, cjson.encode({ rows = rows, tokens_per_second = speed, at = now }))
end

local rows_running, active, tokens_per_second = 0, 0, 0
local all = redis.call('HGETALL', root .. ':running')
for i = 1, #all, 2 do
  local one = cjson.decode(all[i + 1])
  if one.at + fresh < now then
    redis.call('HDEL', root .. ':running', all[i])
  else
    rows_running, active = rows_running + one.rows, active + 1
    tokens_per_second = tokens_per_second + one.tokens_per_second
  end
end

-- What is left, at the length of the rows so far. Unknown until one row is complete.
local c = redis.call('HMGET', root, 'total', 'completed', 'failed', 'completion_tokens')
local eta, completed, made = '', tonumber(c[2]), tonumber(c[4])
if tokens_per_second > 0 and completed > 0 and made > 0 then
  eta = string.format('%.1f', (c[1] - c[2] - c[3]) * (made / completed) / tokens_per_second)
end
touch(root, now, 'rows_running', whole(rows_running), 'workers_active', active,
  'tokens_per_second', string.format('%.1f', tokens_per_second), 'eta_seconds', eta)
return { 'ok', state }
