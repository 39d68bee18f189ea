-- Takes a shard's commit record over from the store. ARGV: prefix, job, shard, record JSON, completed, failed, prompt,
-- completion, cached tokens of its part. No fence is asked for: the commit was decided in the store.
-- Twice: the first record stays, and every caller is told it.
local job, shard, root, now = ARGV[2], ARGV[3], KEYS[1], clock()

local state = get(root, 'state')
if state == '' then return { 'unknown' } end
local known = redis.call('HGET', root .. ':parts', shard)
if known then return { 'ok', state, known } end
if TERMINAL[state] or not account(root, shard, numbers(5, 5)) then return { 'refused', state } end

forget(root, 'shard:' .. shard)
redis.call('HSET', root .. ':parts', shard, ARGV[4])
redis.call('HDEL', root .. ':strikes', 'shard:' .. shard)
redis.call('HDEL', root .. ':trials', 'shard:' .. shard, 'shard:' .. shard .. '/trying')
redis.call('DEL', root .. ':segments:' .. shard)
local done = redis.call('HINCRBY', root, 'shards_done', 1)
unblock(root)
touch(root, now)
event(root, 'committed', 'shard', shard, 'shards_done', done, 'completed', get(root, 'completed'),
  'failed', get(root, 'failed'))
if done == tonumber(get(root, 'shards_total')) then start_finalize(job, root, now) end
index(job)
return { 'ok', get(root, 'state'), ARGV[4] }
