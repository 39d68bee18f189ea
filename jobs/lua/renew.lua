-- Renews leases of one worker, all in one call. ARGV: prefix, ttl ms, then job, task, fence for each.
-- A lease that ran out is renewed too, as long as nobody has taken the task: its holder is plainly alive.
-- Twice: the second call renews again.
local now, ttl = clock(), tonumber(ARGV[2])
local replies, touched = {}, {}

for i = 3, #ARGV, 3 do
  local job, task, fence = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local root = root_of(job)
  local state = get(root, 'state')
  local ok = held(root, task, fence) ~= nil
  if ok then
    redis.call('ZREM', root .. ':pending', task)
    redis.call('ZADD', root .. ':leases', now + ttl, task)
    touched[job] = true
  end
  replies[#replies + 1] = { ok and '1' or '0', state, get(root .. ':meta', 'stop') }
end

for job in pairs(touched) do index(job) end
return replies
