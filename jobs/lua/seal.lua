-- Records one sealed segment of a shard and brings the shard's counts up to date. ARGV: prefix, job, shard, fence, seq,
-- segment JSON, completed, failed, prompt, completion, cached tokens (the shard's absolute totals), token of a rebuild
-- ("": the caller holds the lease; a rebuild records the segments of earlier holders under their own fences).
-- Twice: a segment is one field, named (fence, seq), and counts only when the field is new.
local job, shard, fence, root = ARGV[2], ARGV[3], ARGV[4], KEYS[1]
local task, segments, field = 'shard:' .. ARGV[3], KEYS[1] .. ':segments:' .. ARGV[3], ARGV[4] .. '/' .. ARGV[5]

local state = get(root, 'state')
if state == '' then return { 'unknown' } end
local stop = get(root .. ':meta', 'stop')
local known = redis.call('HGET', segments, field)
if known then return { known == ARGV[6] and 'known' or 'conflict', state, stop } end

local holder = held(root, task, fence)
if ARGV[12] ~= '' then
  if ARGV[12] ~= get(root .. ':meta', 'hold') then return { 'lost', state } end
  if redis.call('HEXISTS', root .. ':parts', shard) == 1 then return { 'known', state, stop } end
elseif not holder then
  return { 'lost', state }
end
if not account(root, shard, numbers(7, 5)) then return { 'lost', state } end

redis.call('HSET', segments, field, ARGV[6])
if holder then
  holder.sealed = holder.sealed + 1
  redis.call('HSET', root .. ':holders', task, cjson.encode(holder))
end
unblock(root)
touch(root, clock())
event(root, 'sealed', 'shard', shard, 'completed', get(root, 'completed'), 'failed', get(root, 'failed'))
return { 'counted', state, stop }
