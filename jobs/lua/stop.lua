-- Makes a job drain, after stop.json said so. ARGV: prefix, job, reason, error code, error message.
-- Refused from finalizing on, and for another reason than the first. Twice: the second call finds it draining.
local job, reason, root, now = ARGV[2], ARGV[3], KEYS[1], clock()

local state = get(root, 'state')
if state == '' then return { 'unknown' } end
if DRAINING[state] then return { get(root .. ':meta', 'stop') == reason and 'ok' or 'refused', state } end
if state == 'finalizing' or not move(root, DRAIN_TO[reason], now) then return { 'refused', state } end

redis.call('HSET', root .. ':meta', 'stop', reason)
redis.call('HSET', root, 'error_code', ARGV[4], 'error_message', ARGV[5])
redis.call('ZREM', PREFIX .. ':deadlines', job)
unblock(root)
index(job)
return { 'ok', get(root, 'state') }
