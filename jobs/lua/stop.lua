-- Makes a job drain, after stop.json said so. ARGV: prefix, job, reason, error code, error message.
-- Refused from finalizing on, and for another reason than the first. Twice: whoever asks again, or whose first reply
-- was lost, is told that it was accepted, however far the job has come since.
local job, reason, root, now = ARGV[2], ARGV[3], KEYS[1], clock()

local state = get(root, 'state')
if state == '' then return { 'unknown' } end
if TERMINAL[state] then return { state == reason and 'ok' or 'refused', state } end
local known = get(root .. ':meta', 'stop')
if known ~= '' then return { known == reason and 'ok' or 'refused', state } end
if not move(root, DRAIN_TO[reason], now) then return { 'refused', state } end

redis.call('HSET', root .. ':meta', 'stop', reason)
redis.call('HSET', root, 'error_code', ARGV[4], 'error_message', ARGV[5])
redis.call('ZREM', PREFIX .. ':deadlines', job)
unblock(root)
index(job)
return { 'ok', get(root, 'state') }
