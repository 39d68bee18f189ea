-- Hands a task back at once, unblamed: no strike, and the attempt is not counted. ARGV: prefix, job, task, fence.
-- Twice: the second call finds no holder and changes nothing.
local job, task, root = ARGV[2], ARGV[3], KEYS[1]

if not held(root, task, ARGV[4]) then return { 'lost', get(root, 'state') } end
forget(root, task)
redis.call('ZADD', root .. ':pending', place_of(task), task)
redis.call('HINCRBY', root .. ':attempts', task, -1)
redis.call('HDEL', root .. ':trials', task .. '/trying')
event(root, 'released', 'task', task)
index(job)
return { 'ok', get(root, 'state') }
