-- Makes a job known. ARGV: prefix, job, digest, epoch, model, priority, max_shards (0: none), expires_at ms (0: none),
-- retention s, context (0: the model's), output, created_at s, expires_at s, hold ms (0: none), hold token.
-- Twice: the second call finds the job by its digest. A hold keeps a job that is being rebuilt from being leased.
local job, digest, model = ARGV[2], ARGV[3], ARGV[5]
local root, meta = KEYS[1], KEYS[1] .. ':meta'

if exists(root .. ':tombstone') then return { 'tombstone' } end
if exists(root) then
  local known = redis.call('HMGET', meta, 'digest', 'hold')
  if ARGV[15] ~= '' and known[2] == ARGV[15] then return { 'created' } end
  return { known[1] == digest and 'exists' or 'conflict' }
end

local now = clock()
redis.call('HSET', root, 'state', 'validating', 'blocked_reason', '', 'model', model, 'total', 0, 'completed', 0,
  'failed', 0, 'prompt_tokens', 0, 'completion_tokens', 0, 'cached_tokens', 0, 'shards_total', 0, 'shards_done', 0,
  'created_at', ARGV[12], 'started_at', '', 'finished_at', '', 'expires_at', ARGV[13], 'output', ARGV[11],
  'error_code', '', 'error_message', '', unpack(IDLE))
touch(root, now)
redis.call('HSET', meta, 'model', model, 'digest', digest, 'epoch', ARGV[4], 'priority', ARGV[6], 'max_shards', ARGV[7],
  'retention', ARGV[9], 'context', ARGV[10], 'fingerprint', '', 'stop', '', 'planned', '', 'blocked_by', '',
  'turn', redis.call('INCR', model_key(model, 'turn')), 'ready', '', 'hold', ARGV[15],
  'hold_until', tonumber(ARGV[14]) > 0 and whole(now + ARGV[14]) or '0')
redis.call('ZADD', root .. ':pending', place_of('plan'), 'plan')
redis.call('ZADD', PREFIX .. ':jobs', tonumber(ARGV[12]), job)
redis.call('SADD', model_key(model, 'jobs'), job)
redis.call('SADD', PREFIX .. ':models', model)
if ARGV[8] ~= '0' then redis.call('ZADD', PREFIX .. ':deadlines', ARGV[8], job) end
event(root, 'state', 'state', 'validating')
if redis.call('ZCOUNT', model_key(model, 'workers'), now, '+inf') == 0 then
  block(root, 'no worker serves ' .. model, 'nobody')
end
index(job)
return { 'created' }
