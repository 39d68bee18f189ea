-- Ends a job as its manifest says. ARGV: prefix, job, state, total, completed, failed, prompt, completion, cached tokens,
-- error code, error message, finished_at s ("": now). The manifest is the decision, so no fence is asked for, and its
-- sums replace the counters. Keys that people read stay for the job's retention, the others go.
-- Twice: an end is final; the second call changes nothing and is told which end it was.
local job, root, meta, now = ARGV[2], KEYS[1], KEYS[1] .. ':meta', clock()

local state = get(root, 'state')
if state == '' then return { 'unknown' } end
if TERMINAL[state] then return { 'ok', state } end
if not (TERMINAL[ARGV[3]] and move(root, ARGV[3], now)) then return { 'refused', state } end

touch(root, now, 'total', ARGV[4], 'completed', ARGV[5], 'failed', ARGV[6], 'prompt_tokens', ARGV[7],
  'completion_tokens', ARGV[8], 'cached_tokens', ARGV[9], 'error_code', ARGV[10], 'error_message', ARGV[11],
  'finished_at', ARGV[12] ~= '' and ARGV[12] or seconds(now), 'blocked_reason', '', unpack(IDLE))
retire(job)
wipe(root)
local retention = tonumber(get(meta, 'retention'))
for _, key in ipairs({ root, meta, root .. ':parts', root .. ':events' }) do
  redis.call('EXPIRE', key, math.max(retention, 60))
end
return { 'ok', ARGV[3] }
